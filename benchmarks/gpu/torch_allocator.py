# Times PyTorch's caching allocator, for measurement 1: one line a size, "BYTES MICROSECONDS...", a figure a repeat.
# Arguments: repeats, then the sizes. Ends with status 3, saying why, when there is no PyTorch with CUDA.
# SPDX-License-Identifier: Apache-2.0
import sys
import time

try:
    import torch
except Exception as error:
    print(f"no PyTorch: {error}")
    sys.exit(3)
if not torch.cuda.is_available():
    print("PyTorch sees no GPU")
    sys.exit(3)

CALLS = 100
repeats = int(sys.argv[1])
alloc = torch.cuda.caching_allocator_alloc
free = torch.cuda.caching_allocator_delete
for size in map(int, sys.argv[2:]):
    samples = []
    for repeat in range(repeats + 1):  # the first warms its cache
        start = time.perf_counter()
        for _ in range(CALLS):
            free(alloc(size))
        samples.append((time.perf_counter() - start) * 1e6 / CALLS)
    print(size, *samples[1:])
