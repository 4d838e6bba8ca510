"""Turns stored measurements into medians, ratios and the text of BENCHMARKS.md.

A measurement is `{cell, metric, subject, value, repeat, load, bound, variant}`; the last two may be missing.
"""

import statistics

import goals

OURS = "Tessera"
# Metric, its title, and whether more of it is better.
METRICS = {
    "tokens_per_s": ("tokens/s", True),
    "output_tokens_per_s": ("output tokens/s", True),
    "tpot_ms": ("TPOT ms", False),
    "ttft_ms": ("TTFT ms", False),
    "gflops": ("GFLOP/s", True),
    "requests_per_s": ("requests/s", True),
    "cpu_us": ("CPU µs a request", False),
    "stream_ms": ("stream ms", False),
    "itl_p50_ms": ("between tokens at p50, ms", False),
    "itl_p99_ms": ("between tokens at p99, ms", False),
    "ttft_p50_ms": ("first token at p50, ms", False),
    "ttft_p99_ms": ("first token at p99, ms", False),
    "added_p50_ms": ("added at p50, ms", False),
    "added_p99_ms": ("added at p99, ms", False),
}
TITLES = {
    "engine": "In process, against llama.cpp",
    "http": "Over HTTP, against vLLM and llama-server",
    "gemm": "Matrix products, against oneDNN",
    "routers": "Routers, against sglang-router",
    "split": "Prefill and decode apart, against both on each worker",
}
INTRODUCTION = """# Benchmarks

Tessera beside other engines on the same machine, the same model files and the same load.
`tests/benches/peers/setup.sh` installs the others from PyPI, `tests/benches/peers/run.py` measures all in turn and writes this file; \
`tests/benches/peers/results.json` holds every single measurement.
Nothing here is written by hand.

Each number is the median of the rounds, with the least and the greatest beside it; engines alternate within each round, and the order turns around from round to round.
A ratio above 1 means that Tessera is faster (for latencies, the other's time over ours).
A goal is what the project asked of itself; **not met** and ratios below 1 stand as they are.
A bound is what the peak and the bandwidth measured in the same run allow.
"""


def summarise(measurements):
    """Groups measurements: {(cell, metric): {subject: summary}}, in the order of their first appearance.

    Of a subject's variants (such as two settings of the same engine) the better median counts, cell by cell.
    """
    groups = {}
    for one in measurements:
        cell = groups.setdefault((one["cell"], one["metric"]), {})
        cell.setdefault(one["subject"], {}).setdefault(one.get("variant"), []).append(one)
    return {
        key: {subject: best(key[1], variants) for subject, variants in subjects.items()}
        for key, subjects in groups.items()
    }


def best(metric, variants):
    """The summary of the variant with the better median."""
    more_is_better = METRICS[metric][1]
    summaries = [spread(variant, runs) for variant, runs in variants.items()]
    return (max if more_is_better else min)(summaries, key=lambda summary: summary["median"])


def spread(variant, runs):
    """Median, extremes and count of one subject's runs, and the median of the bounds given with them."""
    values = [run["value"] for run in runs]
    bounds = [run["bound"] for run in runs if run.get("bound")]
    return {
        "variant": variant,
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
        "bound": statistics.median(bounds) if bounds else None,
    }


def ratio(metric, ours, other):
    """How many times as fast ours is."""
    if METRICS[metric][1]:
        return ours / other
    return other / ours


def verdict(value, goal):
    """A goal and whether the ratio reaches it."""
    if goal is None:
        return ""
    return f"{goal:g}: {'met' if value >= goal else '**not met**'}"


def number(value):
    """Three or more significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def shown(summary):
    """A median with its spread."""
    if summary is None:
        return "–"
    text = number(summary["median"])
    if summary["n"] > 1:
        text += f" ({number(summary['min'])}–{number(summary['max'])})"
    return f"{text} {summary['variant']}" if summary["variant"] else text


def table(section, measurements):
    """A section's Markdown table: one line for each cell and metric."""
    summaries = summarise(measurements)
    peers = []
    for subjects in summaries.values():
        peers += [subject for subject in subjects if subject != OURS and subject not in peers]
    has_bounds = any(subjects.get(OURS, {}).get("bound") for subjects in summaries.values())
    has_goals = [peer for peer in peers if any(goals.goal(section, peer, *key) for key in summaries)]
    titles = ["cell", "metric", OURS]
    for peer in peers:
        titles += [peer, "ratio"] + (["goal"] if peer in has_goals else [])
    lines = [row(titles + ["bound"] * has_bounds), row(["---"] * (len(titles) + has_bounds))]
    for (cell, metric), subjects in summaries.items():
        ours = subjects.get(OURS)
        columns = [cell, METRICS[metric][0], shown(ours)]
        for peer in peers:
            columns += against(section, peer, cell, metric, ours, subjects.get(peer), peer in has_goals)
        if has_bounds:
            columns.append(bound(ours, metric))
        lines.append(row(columns))
    return "\n".join(lines)


def against(section, peer, cell, metric, ours, theirs, with_goal):
    """The columns of one peer."""
    columns, value = [shown(theirs), ""], None
    if ours and theirs:
        value = ratio(metric, ours["median"], theirs["median"])
        columns[1] = f"{value:.2f}"
    if with_goal:
        columns.append("" if value is None else verdict(value, goals.goal(section, peer, cell, metric)))
    return columns


def bound(ours, metric):
    """The bound and which part of it is reached."""
    if not ours or not ours["bound"]:
        return ""
    return f"{number(ours['bound'])} ({100 * ratio(metric, ours['median'], ours['bound']):.0f} %)"


def row(columns):
    """One line of a Markdown table."""
    return "| " + " | ".join(columns) + " |"


def section_text(name, section):
    """One section of the page: where, with what and how it was measured, then the table."""
    measurements = section["measurements"]
    loads = [one["load"] for one in measurements]
    repeats = 1 + max(one["repeat"] for one in measurements)
    lines = [f"## {TITLES[name]}", "", f"Measured on {section['date']} by `{section['command']}`, {repeats} rounds."]
    if section.get("busy"):
        lines += ["", f"**The machine was not idle** (cores up to {100 * section['busy']:.0f} % busy before a run): these are not final numbers."]
    lines += ["", *(f"- {name}: {value}" for name, value in section["machine"].items())]
    lines += [f"- {name}: {value}" for name, value in section["versions"].items()]
    lines += [f"- load average before the runs: {min(loads):.2f} to {max(loads):.2f}"]
    lines += [f"- {note}" for note in section.get("notes", [])]
    return "\n".join([*lines, "", table(name, measurements), ""])


def page(results):
    """The whole of BENCHMARKS.md."""
    sections = [section_text(name, results[name]) for name in TITLES if name in results]
    return "\n".join([INTRODUCTION, *sections])
