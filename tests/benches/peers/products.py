"""Matrix products alone: oneDNN through PyTorch against `tessera bench kernels`."""

import json
import pathlib

import process
from place import many

DEADLINE_S = 900
SCRIPT = pathlib.Path(__file__).with_name("gemm.py")
# Name, rows, and memory that copies of the weight fill: one weight may stay in the caches, as in no model.
WEIGHTS = (("one weight", "1,8,32,64,128,512", 0), ("weights from memory", "1,8", 192))
# As torch.nn.functional.linear does it, and with the weight in oneDNN's own order beforehand.
WAYS = {"plain": "oneDNN", "packed": "oneDNN packed"}


class OneDnn:
    """torch in bf16, in huge pages."""

    name = "oneDNN"

    def __init__(self, place):
        self.place = place

    def measure(self, threads, rows, spread_mb):
        """Yields subject, product, GFLOP/s and no bound."""
        command = [self.place.python, SCRIPT, threads, rows, spread_mb]
        output = process.run(command, DEADLINE_S, env=self.place.huge_pages, log=self.place.log("onednn"))
        for product in json.loads(output)["products"]:
            yield WAYS[product["way"]], name_of(product), product["gflops"], None


class Tessera:
    """`tessera bench kernels`."""

    name = "Tessera"

    def __init__(self, place):
        self.place = place

    def measure(self, threads, rows, spread_mb):
        """Yields subject, product, GFLOP/s and bound; no bound where caches may hold the weight."""
        command = [self.place.tessera, "bench", "kernels", "--kernel", "matmul", "--format", "bf16", "--rows", rows]
        command += ["--threads", threads, "--spread-mb", spread_mb, "--time-ms", 200, "--json"]
        output = process.run(command, DEADLINE_S, log=self.place.log("tessera-kernels"))
        for product in json.loads(output)["results"]:
            bound = product["bound_gflops"] if spread_mb else None
            yield self.name, name_of(product), product["gflops"], bound


class Section:
    """Every product with every number of threads."""

    def __init__(self, place, options):
        self.subjects = [Tessera(place), OneDnn(place)]
        self.threads = options.threads
        self.notes = [
            "cells are rows x inputs x outputs; weights bf16; Tessera's inputs and outputs f32, oneDNN's bf16",
            "oneDNN is torch.nn.functional.linear; packed has the weight in oneDNN's own order; both with GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
        ]

    def rounds(self, order):
        """Yields (label, function) of one round."""
        for threads in self.threads:
            for weights in WEIGHTS:
                for subject in order(self.subjects):
                    label = f"{subject.name}, {many(threads)}, {weights[0]}"
                    yield label, lambda s=subject, t=threads, w=weights: self.run(s, t, *w)

    def run(self, subject, threads, weights, rows, spread_mb):
        """Measures one subject; returns measurements without their repeat and load."""
        return [
            {"cell": f"{product}, {many(threads)}, {weights}", "metric": "gflops", "subject": name, "value": value, "bound": bound}
            for name, product, value, bound in subject.measure(threads, rows, spread_mb)
        ]

    def close(self):
        """Nothing keeps running."""


def name_of(product):
    """A product's shape in words."""
    return f"{product['m']} x {product['k']} x {product['n']}"
