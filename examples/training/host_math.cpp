// SPDX-License-Identifier: Apache-2.0
#include "host_math.hpp"

#include <algorithm>
#include <cmath>

namespace training {

template <class T>
void HostMath<T>::gemm(const Gemm& s, T alpha, const T* a, const T* b, T beta, T* c) {
  queue_->run([=] {
    for (int number = 0; number < s.count; ++number) {
      const T* first = a + number * s.stride_a;
      const T* second = b + number * s.stride_b;
      T* out = c + number * s.stride_c;
      for (int i = 0; i < s.m; ++i) {
        T* row = out + static_cast<int64_t>(i) * s.ld_c;
        for (int j = 0; j < s.n; ++j) row[j] = beta == T{0} ? T{0} : beta * row[j];
        for (int k = 0; k < s.k; ++k) {
          const T left = alpha * (s.transpose_a ? first[static_cast<int64_t>(k) * s.ld_a + i]
                                                : first[static_cast<int64_t>(i) * s.ld_a + k]);
          if (s.transpose_b) {
            for (int j = 0; j < s.n; ++j) row[j] += left * second[static_cast<int64_t>(j) * s.ld_b + k];
          } else {
            const T* right = second + static_cast<int64_t>(k) * s.ld_b;
            for (int j = 0; j < s.n; ++j) row[j] += left * right[j];
          }
        }
      }
    }
  });
}

template <class T>
void HostMath<T>::linear(const T* x, const T* w, const T* bias, T* y, int rows, int in, int out, bool relu) {
  queue_->run([=] {
    for (int i = 0; i < rows; ++i) {
      T* row = y + static_cast<int64_t>(i) * out;
      std::copy(bias, bias + out, row);
      for (int k = 0; k < in; ++k) {
        const T left = x[static_cast<int64_t>(i) * in + k];
        const T* right = w + static_cast<int64_t>(k) * out;
        for (int j = 0; j < out; ++j) row[j] += left * right[j];
      }
      if (relu)
        for (int j = 0; j < out; ++j) row[j] = std::max(row[j], T{0});
    }
  });
}

template <class T>
void HostMath<T>::add_column_sums(const T* x, T* sums, int rows, int columns) {
  queue_->run([=] {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) sums[j] += x[static_cast<int64_t>(i) * columns + j];
  });
}

template <class T>
void HostMath<T>::relu(const T* x, T* y, size_t count) {
  queue_->run([=] {
    for (size_t i = 0; i < count; ++i) y[i] = std::max(x[i], T{0});
  });
}

template <class T>
void HostMath<T>::relu_backward(const T* y, const T* dy, T* dx, size_t count) {
  queue_->run([=] {
    for (size_t i = 0; i < count; ++i) dx[i] = y[i] > T{0} ? dy[i] : T{0};
  });
}

template <class T>
void HostMath<T>::add(const T* a, const T* b, T* y, size_t count) {
  queue_->run([=] {
    for (size_t i = 0; i < count; ++i) y[i] = a[i] + b[i];
  });
}

template <class T>
void HostMath<T>::copy(const T* x, T* y, size_t count) {
  queue_->run([=] { std::copy(x, x + count, y); });
}

template <class T>
void HostMath<T>::softmax(T* x, int rows, int columns) {
  queue_->run([=] {
    for (int i = 0; i < rows; ++i) {
      T* row = x + static_cast<int64_t>(i) * columns;
      const T most = *std::max_element(row, row + columns);
      T sum = 0;
      for (int j = 0; j < columns; ++j) sum += row[j] = std::exp(row[j] - most);
      for (int j = 0; j < columns; ++j) row[j] /= sum;
    }
  });
}

template <class T>
void HostMath<T>::softmax_backward(const T* y, const T* dy, T* dx, int rows, int columns) {
  queue_->run([=] {
    for (int i = 0; i < rows; ++i) {
      const int64_t at = static_cast<int64_t>(i) * columns;
      T dot = 0;
      for (int j = 0; j < columns; ++j) dot += y[at + j] * dy[at + j];
      for (int j = 0; j < columns; ++j) dx[at + j] = y[at + j] * (dy[at + j] - dot);
    }
  });
}

template <class T>
void HostMath<T>::layer_norm(const T* x, const T* gamma, const T* beta, T* y, T* mean, T* scale, int rows,
                             int columns) {
  queue_->run([=] {
    for (int i = 0; i < rows; ++i) {
      const T* row = x + static_cast<int64_t>(i) * columns;
      T sum = 0, squares = 0;
      for (int j = 0; j < columns; ++j) sum += row[j];
      const T middle = sum / static_cast<T>(columns);
      for (int j = 0; j < columns; ++j) squares += (row[j] - middle) * (row[j] - middle);
      mean[i] = middle;
      scale[i] = 1 / std::sqrt(squares / static_cast<T>(columns) + static_cast<T>(kNormEpsilon));
      T* out = y + static_cast<int64_t>(i) * columns;
      for (int j = 0; j < columns; ++j) out[j] = (row[j] - middle) * scale[i] * gamma[j] + beta[j];
    }
  });
}

template <class T>
void HostMath<T>::layer_norm_backward(const T* x, const T* gamma, const T* mean, const T* scale, const T* dy,
                                      T* dx, T* dgamma, T* dbeta, int rows, int columns) {
  queue_->run([=] {
    for (int i = 0; i < rows; ++i) {
      const int64_t at = static_cast<int64_t>(i) * columns;
      T sum = 0, dot = 0;
      for (int j = 0; j < columns; ++j) {
        const T normal = (x[at + j] - mean[i]) * scale[i];
        const T slope = dy[at + j] * gamma[j];
        sum += slope;
        dot += slope * normal;
        dgamma[j] += dy[at + j] * normal;
        dbeta[j] += dy[at + j];
      }
      for (int j = 0; j < columns; ++j) {
        const T normal = (x[at + j] - mean[i]) * scale[i];
        dx[at + j] = scale[i] * (dy[at + j] * gamma[j] - (sum + normal * dot) / static_cast<T>(columns));
      }
    }
  });
}

namespace {

// Calls body(output offset, input offset, weight offset) for every product that a convolution sums.
template <class Body>
void for_each_product(const Convolution& s, const Body& body) {
  const int out = s.out_size();
  for (int n = 0; n < s.batch; ++n)
    for (int o = 0; o < s.out_channels; ++o)
      for (int c = 0; c < s.in_channels; ++c)
        for (int ky = 0; ky < s.kernel; ++ky)
          for (int kx = 0; kx < s.kernel; ++kx) {
            const int64_t weight =
                ((static_cast<int64_t>(o) * s.in_channels + c) * s.kernel + ky) * s.kernel + kx;
            for (int y = 0; y < out; ++y) {
              const int iy = y * s.stride + ky - s.padding;
              if (iy < 0 || iy >= s.size) continue;
              const int64_t to = ((static_cast<int64_t>(n) * s.out_channels + o) * out + y) * out;
              const int64_t from = ((static_cast<int64_t>(n) * s.in_channels + c) * s.size + iy) * s.size;
              // Where the input lies inside the image.
              const int shift = kx - s.padding;
              const int first = shift < 0 ? (-shift + s.stride - 1) / s.stride : 0;
              const int end = std::min(out, (s.size - 1 - shift) / s.stride + 1);
              if (s.stride == 1) {
                for (int x = first; x < end; ++x) body(to + x, from + shift + x, weight);
              } else {
                for (int x = first; x < end; ++x) body(to + x, from + shift + x * s.stride, weight);
              }
            }
          }
}

}  // namespace

template <class T>
void HostMath<T>::convolution(const Convolution& shape, const T* x, const T* w, T* y, const Scratch&) {
  queue_->run([=] {
    const int out = shape.out_size();
    std::fill(y, y + static_cast<int64_t>(shape.batch) * shape.out_channels * out * out, T{0});
    for_each_product(shape, [=](int64_t to, int64_t from, int64_t weight) { y[to] += x[from] * w[weight]; });
  });
}

template <class T>
void HostMath<T>::convolution_backward_data(const Convolution& shape, const T* w, const T* dy, T* dx,
                                            const Scratch&) {
  queue_->run([=] {
    std::fill(dx, dx + static_cast<int64_t>(shape.batch) * shape.in_channels * shape.size * shape.size, T{0});
    for_each_product(shape,
                     [=](int64_t to, int64_t from, int64_t weight) { dx[from] += dy[to] * w[weight]; });
  });
}

template <class T>
void HostMath<T>::convolution_backward_filter(const Convolution& shape, const T* x, const T* dy, T* dw,
                                              const Scratch&) {
  queue_->run([=] {
    for_each_product(shape,
                     [=](int64_t to, int64_t from, int64_t weight) { dw[weight] += dy[to] * x[from]; });
  });
}

template <class T>
void HostMath<T>::batch_norm(const T* x, const T* gamma, const T* beta, T* y, T* running_mean,
                             T* running_variance, T* mean, T* scale, int batch, int channels, int pixels,
                             bool training) {
  queue_->run([=] {
    const auto count = static_cast<T>(batch) * static_cast<T>(pixels);
    const auto share = static_cast<T>(kRunningShare);
    for (int c = 0; c < channels; ++c) {
      const auto at = [=](int n) { return (static_cast<int64_t>(n) * channels + c) * pixels; };
      T middle = running_mean[c];
      T variance = running_variance[c];
      if (training) {
        T sum = 0, squares = 0;
        for (int n = 0; n < batch; ++n)
          for (int p = 0; p < pixels; ++p) sum += x[at(n) + p];
        middle = sum / count;
        for (int n = 0; n < batch; ++n)
          for (int p = 0; p < pixels; ++p) squares += (x[at(n) + p] - middle) * (x[at(n) + p] - middle);
        variance = squares / count;
        running_mean[c] += share * (middle - running_mean[c]);
        running_variance[c] += share * (squares / (count - 1) - running_variance[c]);
      }
      const T factor = 1 / std::sqrt(variance + static_cast<T>(kNormEpsilon));
      if (training) {
        mean[c] = middle;
        scale[c] = factor;
      }
      for (int n = 0; n < batch; ++n)
        for (int p = 0; p < pixels; ++p) y[at(n) + p] = (x[at(n) + p] - middle) * factor * gamma[c] + beta[c];
    }
  });
}

template <class T>
void HostMath<T>::batch_norm_backward(const T* x, const T* gamma, const T* mean, const T* scale, const T* dy,
                                      T* dx, T* dgamma, T* dbeta, int batch, int channels, int pixels) {
  queue_->run([=] {
    const auto count = static_cast<T>(batch) * static_cast<T>(pixels);
    for (int c = 0; c < channels; ++c) {
      const auto at = [=](int n) { return (static_cast<int64_t>(n) * channels + c) * pixels; };
      T sum = 0, dot = 0;
      for (int n = 0; n < batch; ++n)
        for (int p = 0; p < pixels; ++p) {
          sum += dy[at(n) + p];
          dot += dy[at(n) + p] * (x[at(n) + p] - mean[c]) * scale[c];
        }
      dgamma[c] += dot;
      dbeta[c] += sum;
      for (int n = 0; n < batch; ++n)
        for (int p = 0; p < pixels; ++p) {
          const T normal = (x[at(n) + p] - mean[c]) * scale[c];
          dx[at(n) + p] = gamma[c] * scale[c] * (dy[at(n) + p] - (sum + normal * dot) / count);
        }
    }
  });
}

template <class T>
void HostMath<T>::mean_pool(const T* x, T* y, int outer, int count, int inner) {
  queue_->run([=] {
    for (int o = 0; o < outer; ++o)
      for (int i = 0; i < inner; ++i) {
        T sum = 0;
        for (int p = 0; p < count; ++p) sum += x[(static_cast<int64_t>(o) * count + p) * inner + i];
        y[static_cast<int64_t>(o) * inner + i] = sum / static_cast<T>(count);
      }
  });
}

template <class T>
void HostMath<T>::mean_pool_backward(const T* dy, T* dx, int outer, int count, int inner) {
  queue_->run([=] {
    for (int o = 0; o < outer; ++o)
      for (int p = 0; p < count; ++p)
        for (int i = 0; i < inner; ++i)
          dx[(static_cast<int64_t>(o) * count + p) * inner + i] =
              dy[static_cast<int64_t>(o) * inner + i] / static_cast<T>(count);
  });
}

template <class T>
void HostMath<T>::cross_entropy(const T* logits, const int32_t* labels, T* loss, T* dlogits, int rows,
                                int classes) {
  queue_->run([=] {
    T total = 0;
    for (int i = 0; i < rows; ++i) {
      const T* row = logits + static_cast<int64_t>(i) * classes;
      T* slope = dlogits + static_cast<int64_t>(i) * classes;
      const T most = *std::max_element(row, row + classes);
      T sum = 0;
      for (int j = 0; j < classes; ++j) sum += slope[j] = std::exp(row[j] - most);
      for (int j = 0; j < classes; ++j) slope[j] /= sum * static_cast<T>(rows);
      total += std::log(sum) - (row[labels[i]] - most);
      slope[labels[i]] -= 1 / static_cast<T>(rows);
    }
    *loss = total / static_cast<T>(rows);
  });
}

template <class T>
void HostMath<T>::descend(T* values, T* momentum, T* gradients, size_t count, T rate, T mu) {
  queue_->run([=] {
    for (size_t i = 0; i < count; ++i) {
      momentum[i] = mu * momentum[i] + gradients[i];
      values[i] -= rate * momentum[i];
      gradients[i] = 0;
    }
  });
}

template class HostMath<float>;
template class HostMath<double>;

}  // namespace training
