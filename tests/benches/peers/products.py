"""Matrix products alone: oneDNN through PyTorch against `tessera bench kernels`."""

import json
import pathlib

import process
from place import many

DEADLINE_S = 900
SCRIPT = pathlib.Path(__file__).with_name("gemm.py")


class OneDnn:
    """torch.nn.functional.linear in bf16, in huge pages."""

    name = "oneDNN"

    def __init__(self, place):
        self.place = place

    def measure(self, threads):
        """One value for each product."""
        command = [self.place.python, SCRIPT, threads, "bf16"]
        output = process.run(command, DEADLINE_S, env=self.place.huge_pages, log=self.place.log("onednn"))
        return {name_of(product): (product["gflops"], None) for product in json.loads(output)["products"]}


class Tessera:
    """`tessera bench kernels`."""

    name = "Tessera"

    def __init__(self, place):
        self.place = place

    def measure(self, threads):
        """One value and bound for each product."""
        command = [self.place.tessera, "bench", "kernels", "--threads", threads, "--format", "bf16", "--json"]
        output = process.run(command, DEADLINE_S, log=self.place.log("tessera-kernels"))
        products = [result for result in json.loads(output)["results"] if result["kernel"] == "matmul"]
        return {name_of(product): (product["gflops"], product.get("bound_gflops")) for product in products}


class Section:
    """Every product with every number of threads."""

    def __init__(self, place, options):
        self.subjects = [Tessera(place), OneDnn(place)]
        self.threads = options.threads
        self.notes = ["bf16 weights and inputs; cells are rows x inputs x outputs; oneDNN with GLIBC_TUNABLES=glibc.malloc.hugetlb=1"]

    def rounds(self, order):
        """Yields (label, function) of one round."""
        for threads in self.threads:
            for subject in order(self.subjects):
                yield f"{subject.name}, {many(threads)}", lambda s=subject, t=threads: self.run(s, t)

    def run(self, subject, threads):
        """Measures one subject; returns measurements without their repeat and load."""
        return [
            {"cell": f"{name}, {many(threads)}", "metric": "gflops", "subject": subject.name, "value": value, "bound": bound}
            for name, (value, bound) in subject.measure(threads).items()
        ]

    def close(self):
        """Nothing keeps running."""


def name_of(product):
    """A product's shape in words."""
    return f"{product['m']} x {product['k']} x {product['n']}"
