"""What a server could reach at best: the bounds of `tessera bench engine` put together for a load over HTTP."""

import json
import math

import process

DEADLINE_S = 900


def measure(place, model, threads, cells):
    """Runs the engine once for each length of prompt; returns {cell name: {metric: bound}}."""
    prefill_s, step_s = {}, {}
    prompts = sorted({cell.tokens_in for cell in cells})
    batches = sorted({cell.concurrency for cell in cells})
    for tokens_in in prompts:
        # Half-way through the answers.
        context = max(tokens_in + cell.shared + cell.tokens_out // 2 for cell in cells if cell.tokens_in == tokens_in)
        command = [place.tessera, "bench", "engine", "--model", model, "--threads", threads, "--json"]
        command += ["--prompt", tokens_in, "--batch", ",".join(map(str, batches)), "--context", context]
        command += ["--decode-steps", 4, "--repetitions", 1]
        for result in json.loads(process.run(command, DEADLINE_S, log=place.log("tessera-engine")))["results"]:
            if result["test"] == "prefill":
                prefill_s[tokens_in] = tokens_in / result["bound_tokens_per_s"]
            else:
                step_s[tokens_in, result["batch"]] = result["batch"] / result["bound_tokens_per_s"]
    return {
        cell.name: of_cell(cell, prefill_s[cell.tokens_in], step_s[cell.tokens_in, cell.concurrency]) for cell in cells
    }


def of_cell(cell, prefill_s, step_s):
    """Bounds of a burst: all its prompts, then every step with all its sequences; the median first token waits for half."""
    seconds = cell.concurrency * prefill_s + (cell.tokens_out - 1) * step_s
    return {
        "ttft_ms": 1e3 * math.ceil(cell.concurrency / 2) * prefill_s,
        "tpot_ms": 1e3 * step_s,
        "output_tokens_per_s": cell.concurrency * cell.tokens_out / seconds,
    }
