# libtraining_cuda.so, or one line that says why not. Its kernels are compiled wherever nvcc is.
find_program(GPUSHARE_NVCC nvcc HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
if(NOT GPUSHARE_NVCC)
  message(STATUS "training_cuda: skipped, no nvcc (nvcc, cuBLAS and cuDNN are needed)")
  return()
endif()

set(codes)
foreach(architecture IN LISTS GPUSHARE_CUDA_ARCHITECTURES)
  list(APPEND codes -gencode "arch=compute_${architecture},code=sm_${architecture}")
  set(last ${architecture})
endforeach()
list(APPEND codes -gencode "arch=compute_${last},code=compute_${last}")
separate_arguments(nvcc_flags UNIX_COMMAND "${GPUSHARE_NVCC_FLAGS}")
set(kernels "${CMAKE_CURRENT_BINARY_DIR}/kernels.o")
add_custom_command(OUTPUT "${kernels}"
  COMMAND "${GPUSHARE_NVCC}" -std=c++17 ${nvcc_flags} ${codes} -Xcompiler -fPIC,-fvisibility=hidden
          -c "${CMAKE_CURRENT_SOURCE_DIR}/kernels.cu" -o "${kernels}"
  DEPENDS kernels.cu kernels.hpp COMMENT "Compiling CUDA kernels" VERBATIM)
add_custom_target(training_kernels ALL DEPENDS "${kernels}")

find_path(GPUSHARE_CUDNN_INCLUDE cudnn.h HINTS ENV CUDNN_HOME ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES include)
find_path(GPUSHARE_CUBLAS_INCLUDE cublasLt.h HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES include)
foreach(library cublas cublasLt cudnn cudart_static)
  find_library(GPUSHARE_LIB_${library} ${library} HINTS ENV CUDNN_HOME ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES lib64 lib)
endforeach()
foreach(part CUDNN_INCLUDE CUBLAS_INCLUDE LIB_cublas LIB_cublasLt LIB_cudnn LIB_cudart_static)
  if(NOT GPUSHARE_${part})
    message(STATUS "training_cuda: only its kernels are compiled, no ${part} (cuBLAS and cuDNN are needed)")
    return()
  endif()
endforeach()

add_library(training_cuda SHARED cuda_math.cpp "${kernels}")
add_dependencies(training_cuda training_kernels)
target_link_libraries(training_cuda PRIVATE gpushare_options ${GPUSHARE_LIB_cublas} ${GPUSHARE_LIB_cublasLt}
                      ${GPUSHARE_LIB_cudnn} ${GPUSHARE_LIB_cudart_static} Threads::Threads ${CMAKE_DL_LIBS} rt)
target_include_directories(training_cuda SYSTEM PRIVATE "${GPUSHARE_CUBLAS_INCLUDE}" "${GPUSHARE_CUDNN_INCLUDE}")
# cuDNN's plain calls are marked deprecated in favour of its graphs; they are what it needs here.
target_compile_options(training_cuda PRIVATE -Wno-deprecated-declarations)
