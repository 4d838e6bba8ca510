"""Prefill and decode on workers of their own, against both on each: two workers of one core, SmolLM2.

Two loads: 32 requests decode all the time while prompts of 2,000 tokens come at 70 % of what a prefill worker computes
beside them, so that mixed workers hold up what they decode; and prompts of 200 tokens come at 10 %, so that a prefill
worker would do next to nothing. What counts is the time between two tokens of those that decode, and the time to first
token of the prompts.
"""

import asyncio
import contextlib
import json
import pathlib
import random
import statistics
import tempfile
import time

import goals
import process

START_S = 300
# Until a load is even, and until roles are as the scheduler wants them.
SETTLE_S, SETTLE_AUTO_S = 15, 45
N_DECODING = 32
# Prompts that tell how fast a worker is.
N_PACE = 15
BUDGET, BUDGETS = 512, [64, 128, 256, 1_024, 2_048]
MODEL, VOCABULARY = "smollm2", 49_000


class Load:
    """Prompts that come at a share of what a prefill worker computes, beside requests that decode."""

    def __init__(self, n_prompt, share):
        self.n_prompt, self.share = n_prompt, share
        self.name = f"{N_DECODING} decode, prompts of {n_prompt:,} at {share:.0%}"


FOR_SPLIT, FOR_MIXED = Load(2_000, 0.7), Load(200, 0.1)
assert (FOR_SPLIT.name, FOR_MIXED.name) == (goals.SPLIT_BETTER, goals.MIXED_BETTER)


class Cluster:
    """A scheduler, a router and two workers, each with one thread."""

    def __init__(self, place, roles, budget, auto=False):
        self.folder = tempfile.TemporaryDirectory(prefix="tessera-split-")
        folder, at = pathlib.Path(self.folder.name), "127.0.0.1:{}".format
        scheduler, http, grpc, *workers = (process.free_port() for _ in range(5))
        model = place.model("SmolLM2-135M-Instruct-bf16")
        log = place.log("tessera-split")
        self.servers = []

        def start(role, port, *lines):
            text = (
                f'hash_key = "{"07" * 32}"\nscheduler_addresses = ["{at(scheduler)}"]\n'
                f'[membership]\nkind = "embedded"\nendpoints = ["{at(scheduler)}"]\n[{role}]\n' + "\n".join(lines) + "\n"
            )
            config = folder / f"{role}-{port}.toml"
            config.write_text(text)
            command = [place.tessera, role, "--config", config]
            self.servers.append(process.Server(f"tessera {role}", command, port, ready_path="/readyz", ready_s=START_S, log=log))

        shared = [f'model = "{model}"', f'model_name = "{MODEL}"']
        start("scheduler", scheduler, f'listen = "{at(scheduler)}"', f"roles.auto = {str(auto).lower()}")
        for index, (role, port) in enumerate(zip(roles, workers)):
            lines = [f'id = "w{index}"', f'listen = "{at(port)}"', "threads = 1", f"token_budget = {max(budget, 64)}"]
            lines += ["max_running = 64", f"packed_cache = \"{folder / 'packed'}\"", *shared]
            start("worker", port, *lines, *([f'role = "{role}"'] if role else []))
        start("router", http, f'http = "{at(http)}"', f'grpc = "{at(grpc)}"', *shared)
        self.port = http

    def stop(self):
        """Ends all of them."""
        for server in reversed(self.servers):
            server.stop()
        self.folder.cleanup()


async def stream(port, prompt, n_out, seen):
    """One completion; `seen` gets the time of each event with tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": n_out, "temperature": 0, "stream": True, "ignore_eos": True}
    body = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                seen(time.monotonic(), json.loads(line[6:]))
    finally:
        writer.close()


def tokens(rng, n):
    """A prompt that nobody else has."""
    return [rng.randrange(3, VOCABULARY) for _ in range(n)]


async def decode_on(port, rng, gaps, stopping, n_out=400):
    """Decodes again and again."""
    while not stopping.is_set():
        last = None

        def seen(now, event):
            nonlocal last
            if event.get("error"):
                raise process.Failed(f"a request failed: {event['error']}")
            if last is not None:
                gaps.append((now, now - last))
            last = now

        await stream(port, tokens(rng, 16), n_out, seen)


async def first_token(port, prompt):
    """Time to first token in seconds."""
    began, first = time.monotonic(), []
    await stream(port, prompt, 1, lambda now, event: first.append(now))
    if not first:
        raise process.Failed("a prompt got no token")
    return first[0] - began


@contextlib.asynccontextmanager
async def decoding(port, rng):
    """Meanwhile requests decode; gives their gaps between tokens: when each ended, and its seconds."""
    gaps, stopping = [], asyncio.Event()
    tasks = [asyncio.create_task(decode_on(port, rng, gaps, stopping)) for _ in range(N_DECODING)]
    try:
        yield gaps
    finally:
        stopping.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pace(port, n_prompt, rng):
    """Seconds of a prompt when one comes after the other: what a prefill worker computes beside one that decodes."""
    async with decoding(port, rng):
        await asyncio.sleep(SETTLE_S)
        return statistics.median([await first_token(port, tokens(rng, n_prompt)) for _ in range(N_PACE)])


async def run(port, n_prompt, interval, settle_s, seconds, rng):
    """Gaps between tokens and times to first token, in seconds, after things have settled."""
    async with decoding(port, rng) as gaps:
        began = time.monotonic()
        measured_from = began + settle_s
        prompts = []
        while time.monotonic() < measured_from + seconds:
            prompts.append((time.monotonic(), asyncio.create_task(first_token(port, tokens(rng, n_prompt)))))
            # Arrivals are random, the mean is not.
            await asyncio.sleep(interval * rng.uniform(0.5, 1.5))
        end = time.monotonic()
        firsts = [await task for at, task in prompts if at >= measured_from]
    return sorted(gap for at, gap in gaps if measured_from <= at <= end), sorted(firsts)


def percentile(values, share):
    """Of a sorted list."""
    return values[min(len(values) - 1, int(share * len(values)))]


class Section:
    """Split, mixed at each budget, and what the scheduler makes of it."""

    def __init__(self, place, options):
        self.place, self.seconds, self.prompt_s = place, 40, {}
        self.notes = [
            f"two workers of one thread each; {N_DECODING} requests decode, prompts of random tokens come at a share of what a prefill worker computes beside them",
            "split: one worker is told to compute prompts, the other to decode; mixed: each does both; auto: no role is told, the scheduler decides; budget: tokens of a step, 512 where none is named",
            "Tessera is split in the first load and auto in the second",
        ]

    def rounds(self, order):
        """Yields (label, function) of one round."""
        yield "pace", self.pace
        split, decided, mixed = ["prefill", "decode"], [None, None], ["mixed", "mixed"]
        subjects = [(FOR_SPLIT, "Tessera", split, BUDGET), (FOR_SPLIT, "auto", decided, BUDGET), (FOR_SPLIT, "mixed", mixed, BUDGET)]
        subjects += [(FOR_SPLIT, f"mixed, budget {budget:,}", mixed, budget) for budget in BUDGETS]
        subjects += [(FOR_MIXED, "Tessera", decided, BUDGET), (FOR_MIXED, "mixed", mixed, BUDGET), (FOR_MIXED, "split", split, BUDGET)]
        for subject in order(subjects):
            yield f"{subject[1]}: {subject[0].name}", lambda subject=subject: self.run(*subject)

    def pace(self):
        """Finds out how fast a prefill worker computes prompts."""
        if not self.prompt_s:
            cluster = Cluster(self.place, ["prefill", "decode"], BUDGET)
            try:
                for n_prompt in [FOR_SPLIT.n_prompt, FOR_MIXED.n_prompt]:
                    self.prompt_s[n_prompt] = asyncio.run(pace(cluster.port, n_prompt, random.Random(1)))
                    self.notes.append(f"a prompt of {n_prompt:,} takes {self.prompt_s[n_prompt]:.2f} s so")
            finally:
                cluster.stop()
        return []

    def run(self, load, name, roles, budget):
        """One way of sharing the work."""
        is_auto = roles[0] is None
        cluster = Cluster(self.place, roles, budget, is_auto)
        settle_s, interval = SETTLE_AUTO_S if is_auto else SETTLE_S, self.prompt_s[load.n_prompt] / load.share
        try:
            gaps, firsts = asyncio.run(run(cluster.port, load.n_prompt, interval, settle_s, self.seconds, random.Random(7)))
        finally:
            cluster.stop()
        values = {
            "itl_p50_ms": 1e3 * percentile(gaps, 0.5),
            "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
            "ttft_p50_ms": 1e3 * percentile(firsts, 0.5),
            "ttft_p99_ms": 1e3 * percentile(firsts, 0.99),
            "tokens_per_s": len(gaps) / self.seconds,
        }
        return [{"cell": load.name, "metric": metric, "subject": name, "value": value} for metric, value in values.items()]

    def close(self):
        """Every round ends its own."""
