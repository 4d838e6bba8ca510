"""Times bf16 matrix products in PyTorch, whose CPU kernels are oneDNN's, and prints JSON.

Usage: gemm.py THREADS ROWS SPREAD_MB, such as gemm.py 2 1,8,512 192

Each product x[M, K] @ w[N, K]^T is timed twice: `plain` as torch.nn.functional.linear does it, and `packed` with the
weight put into oneDNN's own order beforehand. Copies of the weight are used in turn, so many that they fill SPREAD_MB.
"""

import json
import statistics
import sys
import time

import torch

# Inputs and outputs: the matrices of SmolLM2-135M and its output head, and a square one.
SHAPES = ((576, 1536), (1536, 576), (576, 576), (576, 49152), (2048, 2048))
SECONDS, CALLS_MIN, CALLS_MAX = 0.2, 5, 2000


def timed(product, weights):
    """Median, least and most seconds of a call, after one with each weight that does not count."""
    for weight in weights:
        product(weight)
    seconds, end = [], time.perf_counter() + SECONDS
    while len(seconds) < CALLS_MIN or (time.perf_counter() < end and len(seconds) < CALLS_MAX):
        weight = weights[len(seconds) % len(weights)]
        start = time.perf_counter()
        product(weight)
        seconds.append(time.perf_counter() - start)
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def pack(weight, rows):
    """The weight in the order that oneDNN's kernel for so many rows wants."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def measure(m, k, n, spread_bytes):
    """Both ways of one product."""
    x = torch.randn(m, k, dtype=torch.bfloat16)
    plain = [torch.randn(n, k, dtype=torch.bfloat16) for _ in range(max(1, -(-spread_bytes // (2 * k * n))))]
    ways = {"plain": timed(lambda w: torch.nn.functional.linear(x, w), plain)}
    packed = [pack(weight, m) for weight in plain]
    ways["packed"] = timed(lambda w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), packed)
    for way, seconds in ways.items():
        gflops, gb_per_s = 2e-9 * m * k * n / seconds["median"], 2e-9 * k * n / seconds["median"]
        us = {name: 1e6 * value for name, value in seconds.items()}
        yield {"m": m, "k": k, "n": n, "way": way, "us": us, "gflops": gflops, "gb_per_s": gb_per_s}


def main():
    threads, rows, spread_mb = int(sys.argv[1]), [int(m) for m in sys.argv[2].split(",")], int(sys.argv[3])
    torch.set_num_threads(threads)
    with torch.no_grad():
        products = [one for k, n in SHAPES for m in rows for one in measure(m, k, n, spread_mb << 20)]
    print(json.dumps({"torch": torch.__version__, "threads": threads, "products": products}, indent=1))


if __name__ == "__main__":
    main()
