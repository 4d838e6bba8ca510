"""How much faster than each peer Tessera has to be: ratios of speeds, or of the peer's latency to ours."""

ENGINE_TWO_THREADS = {
    ("SmolLM2 bf16", "prefill 512"): 6.0,
    ("SmolLM2 bf16", "decode 1"): 2.0,
    ("SmolLM2 bf16", "decode 8"): 6.0,
    ("SmolLM2 bf16", "decode 32"): 7.0,
    ("SmolLM2 Q4_1", "prefill 512"): 8.0,
    ("SmolLM2 Q4_1", "decode 1"): 1.7,
    ("SmolLM2 Q4_1", "decode 8"): 4.0,
    ("SmolLM2 Q4_1", "decode 32"): 7.0,
    ("Gemma3-270m Q4_K_M", "prefill 512"): 4.0,
    ("Gemma3-270m Q4_K_M", "decode 1"): 1.3,
    ("Gemma3-270m Q4_K_M", "decode 8"): 3.0,
}
ENGINE_ONE_THREAD = 1.3

SPEED = ("output_tokens_per_s", "tpot_ms")
# Cell, then the goal for output tokens/s and 1/TPOT, then the goal for 1/TTFT.
HTTP = {
    "128 in, 128 out, 1 at a time": (3.0, 1.6),
    "128 in, 128 out, 8 at a time": (3.0, 1.6),
    "128 in, 128 out, 32 at a time": (2.0, 1.4),
    "512 in, 128 out, 1 at a time": (3.0, 1.6),
    "512 in, 128 out, 8 at a time": (2.0, 1.4),
    "512 in, 128 out, 32 at a time": (1.5, 1.2),
    "528 in, 512 of them cached": (None, 4.0),
    "528 in, none cached": (None, 1.3),
}
# Where splitting is better than mixed workers with the same budget: half the time between tokens, and first tokens at most
# half as long again. Where mixed is better, what the scheduler decides is at most 15 % behind it.
SPLIT = {"itl_p99_ms": 2.0, "ttft_p99_ms": 1 / 1.5}
DECIDED = {"itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms"}
SPLIT_BETTER, MIXED_BETTER = "32 decode, prompts of 2,000 at 70%", "32 decode, prompts of 200 at 10%"
ROUTER_SATURATED = ("tokens in, 1 out, 32 at a time", "requests_per_s")


def goal(section, peer, cell, metric):
    """The ratio that a cell has to reach against a peer, or None."""
    if section == "engine" and peer == "llama.cpp":
        return engine(cell)
    if section == "http" and peer == "vLLM" and cell in HTTP:
        speed, first_token = HTTP[cell]
        return speed if metric in SPEED else first_token
    if section == "routers" and peer == "sglang-router" and (cell, metric) == ROUTER_SATURATED:
        return 1.5
    if section == "split" and (peer, cell) == ("mixed", SPLIT_BETTER):
        return SPLIT.get(metric)
    if section == "split" and (peer, cell) == ("mixed", MIXED_BETTER):
        return 1 / 1.15 if metric in DECIDED else None
    if section == "gemm" and peer == "oneDNN":
        return product(cell)
    return None


def engine(cell):
    """Cells are named `MODEL, N threads, TEST`."""
    model, threads, test = cell.split(", ")
    if threads == "1 thread":
        return ENGINE_ONE_THREAD
    return ENGINE_TWO_THREADS.get((model, test)) if threads == "2 threads" else None


def product(cell):
    """Cells are named `M x K x N, N threads`: large products match oneDNN, small ones are ahead of it."""
    rows = int(cell.split(" ", 1)[0])
    if rows >= 64:
        return 1.0
    return 1.3 if rows <= 8 else None
