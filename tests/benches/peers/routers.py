"""Requests a second and CPU time of a router on one core: sglang-router before a stub, Tessera before an instant worker.

The client (wrk), and whatever answers, share another core. sglang-router passes text on as it is; Tessera takes tokens, or
text that it tokenises, places by cached prefixes, and turns tokens into text. What Tessera adds to a request's time beside
the same call straight to its worker, and what it does with long prompts, no peer is asked.
"""

import itertools
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time

import process

START_S, SECONDS = 120, 4
# The router alone on one core, all others on the other.
ROUTER_CORE, OTHER_CORE = 1, 0
WORDS = ["river", "stone", "light", "house", "winter", "paper", "music", "garden"]
N_PROMPT = 128
MODEL = "smollm2"
TEXT = " ".join(WORDS[index % len(WORDS)] for index in range(N_PROMPT))
TOKENS = [1000 + 7 * index for index in range(N_PROMPT)]
# Name, prompt by subject, connections, and tokens out (streamed when more than one).
CELLS = {
    "tokens in, 1 out, 32 at a time": (TOKENS, 32, 1),
    "text in, 1 out, 32 at a time": (TEXT, 32, 1),
    "128 chunks streamed, 1 at a time": (TOKENS, 1, 128),
    "128 chunks streamed, 16 at a time": (TOKENS, 16, 128),
}
# Long prompts share their beginning; the rest of each is new.
LONG_CELL, LONG_BYTES, LONG_SHARED, LONG_CONNECTIONS = "220 KB texts that share 90 %, 1 out, 4 at a time", 220_000, 0.9, 4
LONG_CONTEXT = 131_072
ADDED_CELL, ADDED_RATE = "128 in, 1 out, 200 a second", 200
# Ways of `tessera bench router`, and the bound of all: two more hops between processes that sleep.
RELAY = "relay"
WAYS = {"tokens": "tokens in", "text": "text in", RELAY: "tokens in, a bare relay in the router's place"}
SCRIPT = """\
wrk.method = "POST"
wrk.path = "/v1/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.body = io.open(os.getenv("BODY")):read("*a")
local n_fresh, words = tonumber(os.getenv("FRESH")), {}
for word in string.gmatch(os.getenv("WORDS"), "%a+") do words[#words + 1] = word end
function fresh_request()
  local fresh = {}
  for index = 1, n_fresh do fresh[index] = words[math.random(#words)] .. math.random(999) end
  return wrk.format(nil, nil, nil, (string.gsub(wrk.body, "FRESH", table.concat(fresh, " "))))
end
if n_fresh > 0 then request = fresh_request end
function done(summary, latency)
  local e = summary.errors
  io.write(string.format("{\\"requests\\": %d, \\"us\\": %d, \\"p50_us\\": %d, \\"p99_us\\": %d, \\"failed\\": %d}\\n",
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def pinned(core, command):
    """The command on one core."""
    return ["taskset", "-c", str(core), *command]


def cpu_seconds(pid):
    """CPU time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Sglang:
    """sglang-router before a stub that answers at once."""

    name = "sglang-router"

    def __init__(self, place):
        python = place.peers / "routers/bin/python"
        if not python.exists():
            raise process.Failed("there is no sglang-router; run tests/benches/peers/setup.sh routers")
        stub, port = process.free_port(), process.free_port()
        here = pathlib.Path(__file__).with_name("stub.py")
        log = place.log("sglang-router")
        self.stub = process.Server("stub", pinned(OTHER_CORE, [python, here, stub]), stub, log=log, ready_s=START_S)
        command = [python, "-m", "sglang_router.launch_router", "--worker-urls", self.stub.url, "--policy", "cache_aware"]
        command += ["--host", "127.0.0.1", "--port", port, "--log-level", "warn", "--prometheus-port", process.free_port()]
        self.router = process.Server("sglang-router", pinned(ROUTER_CORE, command), port, log=log, ready_s=START_S)
        self.model = "stub"

    def prompt(self, prompt):
        """It takes text only, and does not look at it."""
        return TEXT

    def stop(self):
        """Ends both."""
        self.router.stop()
        self.stub.stop()


class Tessera:
    """A router, and on the other core a scheduler and a worker whose steps take no time."""

    name = "Tessera"

    def __init__(self, place):
        self.folder = tempfile.TemporaryDirectory(prefix="tessera-routers-")
        scheduler, worker, http, grpc = (process.free_port() for _ in range(4))
        model = long_model(place.model("SmolLM2-135M-Instruct-bf16"), pathlib.Path(self.folder.name))
        at = "127.0.0.1:{}".format
        config = pathlib.Path(self.folder.name) / "cluster.toml"
        config.write_text(
            f'hash_key = "{"07" * 32}"\nscheduler_addresses = ["{at(scheduler)}"]\n'
            f'[membership]\nkind = "embedded"\nendpoints = ["{at(scheduler)}"]\n'
            f'[scheduler]\nlisten = "{at(scheduler)}"\n'
            f'[worker]\nid = "w"\nlisten = "{at(worker)}"\nmodel = "{model}"\nmodel_name = "{MODEL}"\n'
            f'[router]\nhttp = "{at(http)}"\ngrpc = "{at(grpc)}"\nmodel = "{model}"\nmodel_name = "{MODEL}"\n'
        )
        log = place.log("tessera-router")

        def start(role, core, port, *more):
            command = pinned(core, [place.tessera, role, "--config", config, *more])
            return process.Server(f"tessera {role}", command, port, ready_path="/readyz", ready_s=START_S, log=log)

        self.others = [start("scheduler", OTHER_CORE, scheduler)]
        self.others.append(start("worker", OTHER_CORE, worker, "--engine", "sim", "--profile", "instant"))
        self.router = start("router", ROUTER_CORE, http)
        self.grpc, self.worker, self.tessera = at(grpc), at(worker), place.tessera
        self.model = MODEL

    def prompt(self, prompt):
        """Tokens or text."""
        return prompt

    def stop(self):
        """Ends all of them."""
        for server in [self.router, *self.others]:
            server.stop()
        self.folder.cleanup()


SUBJECTS = (Tessera, Sglang)


def long_model(model, folder):
    """The model's files, with a context that long prompts fit: nothing here looks at its weights."""
    folder = folder / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONG_CONTEXT}))
    return folder


def long_text():
    """What long prompts share, and the mark for what each has of its own."""
    words = (WORDS[index * 7 % len(WORDS)] + str(index) for index in range(LONG_BYTES))
    text = " ".join(itertools.islice(words, LONG_BYTES // 9))
    return text[: int(LONG_BYTES * LONG_SHARED)] + " FRESH"


class Section:
    """Every cell on every router."""

    def __init__(self, place, options):
        self.place = place
        for program in ("wrk", "taskset"):
            if shutil.which(program) is None:
                raise process.Failed(f"{program} is missing; install it (Debian: apt-get install wrk util-linux)")
        self.notes = [
            f"the router alone on core {ROUTER_CORE}; wrk and what answers on core {OTHER_CORE}; prompts of {N_PROMPT} tokens or words",
            "sglang-router takes text and does not tokenise: its text stands beside Tessera's tokens",
            "CPU is the router's own, for each request",
            "a stream of 128 tokens reaches Tessera's client in fewer chunks: its worker sends what comes within a millisecond in one frame",
            "added: the way through the router less the same request straight to the worker, at the same percentile",
        ]

    def rounds(self, order):
        """Yields (label, function) of one round."""
        for subject in order(SUBJECTS):
            yield subject.name, lambda s=subject: self.run(s)

    def run(self, subject):
        """All cells on one router."""
        running = subject(self.place)
        try:
            found = [one for name, cell in CELLS.items() for one in self.measure(running, name, cell)]
            if subject is Tessera:
                found += self.added(running)
                n_fresh = int(LONG_BYTES * (1 - LONG_SHARED) / 9)
                found += self.measure(running, LONG_CELL, (long_text(), LONG_CONNECTIONS, 1), n_fresh)
            return found
        finally:
            running.stop()

    def added(self, running):
        """What the router adds to a request's time, and what a relay that looks at nothing adds in its place."""
        ways = self.ways(running, running.worker)
        here, port = pathlib.Path(__file__).with_name("relay.py"), process.free_port()
        command = pinned(ROUTER_CORE, [sys.executable, here, port, running.worker])
        relay = process.Server("relay", command, port, ready_path="/readyz", log=self.place.log("relay"), ready_s=START_S)
        try:
            ways[RELAY] = self.ways(running, f"127.0.0.1:{port}")["worker"]
        finally:
            relay.stop()
        values = {}
        for way, title in WAYS.items():
            if ways[way]["n_failed"]:
                raise process.Failed(f"{title}: {ways[way]['failure']}")
            for metric in ("p50", "p99"):
                added = ways[way]["ms"][metric] - ways["worker"]["ms"][metric]
                values[f"{ADDED_CELL}, {title}", f"added_{metric}_ms"] = added
        return [{"cell": cell, "metric": metric, "subject": running.name, "value": value} for (cell, metric), value in values.items()]

    def ways(self, running, worker):
        """What `tessera bench router` sees, by way; straight to the worker is through `worker`."""
        command = pinned(OTHER_CORE, [running.tessera, "bench", "router", "--router", running.grpc, "--worker", worker])
        command += ["--rate", ADDED_RATE, "--time-s", 2 * SECONDS, "--prompt-tokens", N_PROMPT, "--json"]
        output = process.run(command, 2 * SECONDS + 60, log=self.place.log("tessera-bench-router"))
        return {one["way"]: one for one in json.loads(output[output.index("{") :])["results"]}

    def measure(self, running, name, cell, n_fresh=0):
        """One cell: requests a second or the median stream, and CPU time."""
        prompt, connections, n_out = cell
        self.load(running, prompt, connections, n_out, 1, n_fresh)
        before = cpu_seconds(running.router.child.pid)
        found = self.load(running, prompt, connections, n_out, SECONDS, n_fresh)
        cpu_us = (cpu_seconds(running.router.child.pid) - before) * 1e6 / max(found["requests"], 1)
        if found["failed"]:
            raise process.Failed(f"{running.name}, {name}: {found['failed']} of {found['requests']} requests failed")
        values = {"cpu_us": cpu_us}
        if n_out == 1 or connections > 1:
            values["requests_per_s"] = found["requests"] / found["us"] * 1e6
        else:
            values["stream_ms"] = found["p50_us"] / 1e3
        return [{"cell": name, "metric": metric, "subject": running.name, "value": value} for metric, value in values.items()]

    def load(self, running, prompt, connections, n_out, seconds, n_fresh=0):
        """Runs wrk and reads what it says; each prompt gets `n_fresh` words of its own where it is marked."""
        body = {"model": running.model, "prompt": running.prompt(prompt), "max_tokens": n_out, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True} if n_out > 1 else {}
        with tempfile.TemporaryDirectory(prefix="wrk-") as folder:
            folder = pathlib.Path(folder)
            (folder / "body").write_text(json.dumps(body))
            (folder / "load.lua").write_text(SCRIPT)
            command = pinned(OTHER_CORE, ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", folder / "load.lua"])
            env = {"BODY": str(folder / "body"), "FRESH": str(n_fresh), "WORDS": " ".join(WORDS)}
            output = process.run([*command, running.router.url], seconds + 60, env=env, log=self.place.log("wrk"))
        found = re.search(r"^\{.*\}$", output, re.MULTILINE)
        if not found:
            raise process.Failed(f"wrk said nothing of {running.name}: {output[-200:]}")
        return json.loads(found.group())

    def close(self):
        """Every round ends its own."""
