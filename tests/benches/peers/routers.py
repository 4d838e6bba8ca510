"""Requests a second and CPU time of a router on one core: sglang-router before a stub, Tessera before an instant worker.

The client (wrk), and whatever answers, share another core. sglang-router passes text on as it is; Tessera takes tokens, or
text that it tokenises, places by cached prefixes, and turns tokens into text.
"""

import json
import os
import pathlib
import re
import shutil
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
SCRIPT = """\
wrk.method = "POST"
wrk.path = "/v1/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.body = io.open(os.getenv("BODY")):read("*a")
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
        model = place.model("SmolLM2-135M-Instruct-bf16")
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
        ]

    def rounds(self, order):
        """Yields (label, function) of one round."""
        for subject in order(SUBJECTS):
            yield subject.name, lambda s=subject: self.run(s)

    def run(self, subject):
        """All cells on one router."""
        running = subject(self.place)
        try:
            return [one for name, cell in CELLS.items() for one in self.measure(running, name, cell)]
        finally:
            running.stop()

    def measure(self, running, name, cell):
        """One cell: requests a second or the median stream, and CPU time."""
        prompt, connections, n_out = cell
        self.load(running, prompt, connections, n_out, 1)
        before = cpu_seconds(running.router.child.pid)
        found = self.load(running, prompt, connections, n_out, SECONDS)
        cpu_us = (cpu_seconds(running.router.child.pid) - before) * 1e6 / max(found["requests"], 1)
        if found["failed"]:
            raise process.Failed(f"{running.name}, {name}: {found['failed']} of {found['requests']} requests failed")
        values = {"cpu_us": cpu_us}
        if n_out == 1 or connections > 1:
            values["requests_per_s"] = found["requests"] / found["us"] * 1e6
        else:
            values["stream_ms"] = found["p50_us"] / 1e3
        return [{"cell": name, "metric": metric, "subject": running.name, "value": value} for metric, value in values.items()]

    def load(self, running, prompt, connections, n_out, seconds):
        """Runs wrk and reads what it says."""
        body = {"model": running.model, "prompt": running.prompt(prompt), "max_tokens": n_out, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True} if n_out > 1 else {}
        with tempfile.TemporaryDirectory(prefix="wrk-") as folder:
            folder = pathlib.Path(folder)
            (folder / "body").write_text(json.dumps(body))
            (folder / "load.lua").write_text(SCRIPT)
            command = pinned(OTHER_CORE, ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", folder / "load.lua"])
            env = {"BODY": str(folder / "body")}
            output = process.run([*command, running.router.url], seconds + 60, env=env, log=self.place.log("wrk"))
        found = re.search(r"^\{.*\}$", output, re.MULTILINE)
        if not found:
            raise process.Failed(f"wrk said nothing of {running.name}: {output[-200:]}")
        return json.loads(found.group())

    def close(self):
        """Every round ends its own."""
