"""Checks what the sections read from the programs' output. Run: python3 -m unittest discover -s tests/benches/peers"""

import json
import os
import pathlib
import select
import tempfile
import types
import unittest
from unittest import mock

import bounds
import engine
import process
import products
import run
import serving

PLACE = types.SimpleNamespace(
    peers=pathlib.Path("peers"),
    python="python",
    tessera="tessera",
    huge_pages={},
    model=lambda name: f"models/{name}",
    log=lambda name: None,
)
OPTIONS = types.SimpleNamespace(models=["SmolLM2 bf16"], threads=[2], peers=None, concurrency=[1, 8, 32])


def printing(*outputs):
    """Programs print these texts, one after the other."""
    return mock.patch("process.run", side_effect=[text if isinstance(text, str) else json.dumps(text) for text in outputs])


class Sections(unittest.TestCase):
    def test_llama_cpp_gives_prefill_and_every_batch(self):
        lines = "noise\n" + "\n".join(json.dumps({"pl": pl, "speed_tg": 10.0 * pl}) for pl in (1, 8, 32))
        with printing([{"avg_ts": 400.0}], lines) as programs:
            tests = engine.LlamaCpp(PLACE).measure("SmolLM2 bf16", 2, "repack")
        self.assertEqual({name: value for name, (value, _) in tests.items()},
                         {"prefill 512": 400.0, "decode 1": 10.0, "decode 8": 80.0, "decode 32": 320.0})
        self.assertNotIn("--no-repack", programs.call_args.args[0])

    def test_engine_cells_of_both_engines_have_the_same_names(self):
        results = [{"test": "prefill", "tokens": 512, "tokens_per_s": {"median": 900.0}, "bound_tokens_per_s": 1000.0}]
        results += [{"test": "decode", "batch": 8, "tokens_per_s": {"median": 90.0}, "bound_tokens_per_s": 100.0}]
        with printing({"results": results}):
            measurements = engine.Section(PLACE, OPTIONS).run(engine.Tessera(PLACE), "SmolLM2 bf16", 2, None)
        cells = [one["cell"] for one in measurements]
        self.assertEqual(cells, ["SmolLM2 bf16, 2 threads, prefill 512", "SmolLM2 bf16, 2 threads, decode 8"])
        self.assertEqual([one["bound"] for one in measurements], [1000.0, 100.0])

    def test_products_have_bounds_only_where_weights_come_from_memory(self):
        product = {"kernel": "matmul", "m": 8, "k": 576, "n": 1536, "gflops": 50.0, "bound_gflops": 60.0}
        section = products.Section(PLACE, OPTIONS)
        with printing({"results": [product]}, {"results": [product]}):
            cached = section.run(section.subjects[0], 2, "one weight", "8", 0)
            streamed = section.run(section.subjects[0], 2, "weights from memory", "8", 192)
        self.assertEqual((cached[0]["bound"], streamed[0]["bound"]), (None, 60.0))

    def test_a_load_with_unanswered_or_short_requests_is_a_failure(self):
        point = {"completed": 3, "short": 1, "error_examples": {}}
        section, server = serving.Section(PLACE, OPTIONS), types.SimpleNamespace(name="vLLM", url="")
        with printing({"points": [point]}), self.assertRaisesRegex(process.Failed, "1 answers were short"):
            section.load(server, serving.CELLS[0])

    def test_every_load_has_prompts_of_its_own(self):
        cell, server = serving.CELLS[0], types.SimpleNamespace(name="vLLM", url="")
        point = {"completed": cell.requests, "short": 0, "error_examples": {}}
        section = serving.Section(PLACE, OPTIONS)
        with printing({"points": [point]}, {"points": [point]}) as programs:
            section.load(server, cell)
            section.load(server, cell)
        first, second = (call.args[0] for call in programs.call_args_list)
        self.assertNotEqual(first[first.index("--seed") + 1], second[second.index("--seed") + 1])


class Bounds(unittest.TestCase):
    def test_a_burst_computes_all_prompts_and_then_every_step(self):
        cell = serving.Cell("burst", tokens_in=100, tokens_out=11, concurrency=8, requests=8)
        results = [{"test": "prefill", "tokens": 100, "bound_tokens_per_s": 1000.0}]
        results += [{"test": "decode", "batch": 8, "bound_tokens_per_s": 80.0}]
        with printing({"results": results}):
            found = bounds.measure(PLACE, "model", 2, [cell])["burst"]
        self.assertAlmostEqual(found["ttft_ms"], 400)
        self.assertAlmostEqual(found["tpot_ms"], 100)
        self.assertAlmostEqual(found["output_tokens_per_s"], 88 / 1.8)


class Rounds(unittest.TestCase):
    def test_rounds_alternate_and_turn_around(self):
        section = engine.Section(PLACE, OPTIONS)
        names = [[label.split(",")[0] for label, _ in section.rounds(run.forth_and_back(n))] for n in (0, 1)]
        self.assertEqual(names, [["Tessera", "llama.cpp"], ["llama.cpp", "Tessera"]])

    def test_a_run_that_fails_is_noted_and_the_next_one_goes_on(self):
        result = {"notes": [], "measurements": [], "busy": 0.0}

        def crash():
            raise process.Failed("llama-bench died of SIGILL")

        with mock.patch("machine.wait_until_idle", return_value=0.0), mock.patch("sys.stderr"):
            for _ in range(2):
                run.step(result, "engine 1/5: llama.cpp", crash, 0, 0)
            run.step(result, "engine 1/5: Tessera", lambda: [{"value": 1.0}], 0, 0)
        self.assertEqual(result["notes"], ["failed: llama.cpp: llama-bench died of SIGILL"])
        self.assertEqual(result["measurements"][0]["repeat"], 0)

    def test_the_shown_command_has_no_places(self):
        shown = run.shown_command(["engine", "--tessera", "/tmp/t", "--peers-dir=/tmp/p", "--repeats", "3"])
        self.assertEqual(shown, "tests/benches/peers/run.py engine --repeats 3")


class Programs(unittest.TestCase):
    def test_a_program_that_fails_hangs_or_dies_is_named(self):
        with self.assertRaisesRegex(process.Failed, "sh failed with status 3"):
            process.run(["sh", "-c", "exit 3"], 10)
        with self.assertRaisesRegex(process.Failed, "sh died of SIGKILL"):
            process.run(["sh", "-c", "kill -9 $$"], 10)
        with self.assertRaisesRegex(process.Failed, "sleep did not end within 0.05 s"):
            process.run(["sleep", "60"], 0.05)
        with self.assertRaisesRegex(process.Failed, "cannot start no-such-program"):
            process.run(["no-such-program"], 10)

    def test_children_end_with_their_program(self):
        with tempfile.TemporaryDirectory() as folder:
            pipe = pathlib.Path(folder, "pipe")
            os.mkfifo(pipe)
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            # The child holds the pipe open, and whoever reads it sees its end when the child is gone.
            process.run(["sh", "-c", f"exec 3>{pipe}; sleep 60 >/dev/null & exit 0"], 10)
            self.assertTrue(select.select([reader], [], [], 10)[0], "a child is left")
            self.assertEqual(os.read(reader, 1), b"")
            os.close(reader)


if __name__ == "__main__":
    unittest.main()
