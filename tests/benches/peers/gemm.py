"""Times matrix products in PyTorch, whose CPU kernels are oneDNN's, and prints JSON. Usage: gemm.py THREADS [bf16|f32]

Each entry: rows M, inputs K, outputs N, threads, dtype, microseconds {median, min, max}, GFLOP/s and GB/s of weights.
"""

import json
import statistics
import sys
import time

import torch

# Products of SmolLM2-135M (hidden 576, feed-forward 1536, vocabulary 49152), then two large squares.
SHAPES = [(m, 576, 1536) for m in (1, 8, 32, 64, 128, 512)]
SHAPES += [(512, 1536, 576), (512, 576, 576)]
SHAPES += [(m, 576, 49152) for m in (1, 8, 32)]
SHAPES += [(2048, 2048, 2048), (4096, 4096, 4096)]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def times(product, repeats):
    """Seconds of each call, after three that do not count."""
    for _ in range(3):
        product()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(threads, dtype, m, k, n):
    """One product x[M, K] @ w[N, K]^T."""
    x, w = torch.randn(m, k, dtype=DTYPES[dtype]), torch.randn(n, k, dtype=DTYPES[dtype])
    operations = 2 * m * k * n
    repeats = max(5, min(300, int(1e10 / operations)))
    with torch.no_grad():
        seconds = times(lambda: torch.nn.functional.linear(x, w), repeats)
    median = statistics.median(seconds)
    return {
        "m": m,
        "k": k,
        "n": n,
        "threads": threads,
        "dtype": dtype,
        "us": {"median": median * 1e6, "min": min(seconds) * 1e6, "max": max(seconds) * 1e6},
        "gflops": operations / median / 1e9,
        "gb_per_s": k * n * w.element_size() / median / 1e9,
    }


def main():
    threads = int(sys.argv[1])
    dtype = sys.argv[2] if len(sys.argv) > 2 else "bf16"
    torch.set_num_threads(threads)
    products = [measure(threads, dtype, *shape) for shape in SHAPES]
    print(json.dumps({"torch": torch.__version__, "products": products}, indent=1))


if __name__ == "__main__":
    main()
