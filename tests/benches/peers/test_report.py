"""Checks statistics, goals and rendering. Run: python3 -m unittest discover -s tests/benches/peers"""

import unittest

import engine
import goals
import report
import serving


def measurement(subject, value, metric="tokens_per_s", cell="SmolLM2 bf16, 2 threads, decode 8", **more):
    return {"cell": cell, "metric": metric, "subject": subject, "value": value, "repeat": 0, "load": 0.1, **more}


def section(measurements):
    machine = {"cpu": "a processor"}
    return {"date": "today", "command": "run.py engine", "machine": machine, "versions": {}, "measurements": measurements}


class Statistics(unittest.TestCase):
    def test_the_median_and_the_extremes_of_the_rounds_count(self):
        runs = [measurement("Tessera", value) for value in (5, 1, 9)]
        (subjects,) = report.summarise(runs).values()
        self.assertEqual((subjects["Tessera"]["median"], subjects["Tessera"]["min"], subjects["Tessera"]["max"]), (5, 1, 9))

    def test_of_two_settings_the_peers_better_one_counts(self):
        runs = [measurement("llama.cpp", 10, variant="repack"), measurement("llama.cpp", 12, variant="no repack")]
        (subjects,) = report.summarise(runs).values()
        self.assertEqual(subjects["llama.cpp"]["median"], 12)
        late = [measurement("vLLM", 10, "ttft_ms", variant="a"), measurement("vLLM", 12, "ttft_ms", variant="b")]
        (subjects,) = report.summarise(late).values()
        self.assertEqual(subjects["vLLM"]["median"], 10)

    def test_a_ratio_above_one_means_that_ours_is_faster(self):
        self.assertEqual(report.ratio("tokens_per_s", 20, 10), 2)
        self.assertEqual(report.ratio("ttft_ms", 20, 10), 0.5)


class Rendering(unittest.TestCase):
    def test_losses_and_missed_goals_stand_on_the_page(self):
        runs = [measurement("Tessera", 90.0, bound=180.0), measurement("llama.cpp", 100.0)]
        page = report.page({"engine": section(runs)})
        self.assertIn("| 0.90 | 6: **not met** | 180 (50 %) |", page)

    def test_met_goals_say_so(self):
        table = report.table("engine", [measurement("Tessera", 700.0), measurement("llama.cpp", 100.0)])
        self.assertIn("| 7.00 | 6: met |", table)

    def test_a_peer_without_a_value_leaves_a_gap(self):
        table = report.table("http", [measurement("Tessera", 7.0, "ttft_ms", "528 in, none cached")])
        self.assertIn("| Tessera |", table)
        runs = [measurement("Tessera", 7.0, "ttft_ms", "a"), measurement("vLLM", 9.0, "ttft_ms", "b")]
        self.assertIn("| a | TTFT ms | 7.00 | – |", report.table("http", runs))

    def test_a_busy_machine_is_named(self):
        busy = {**section([measurement("Tessera", 1.0)]), "busy": 0.5}
        self.assertIn("not idle", report.page({"engine": busy}))

    def test_sections_that_were_not_measured_again_stay(self):
        results = {"engine": section([measurement("Tessera", 1.0)])}
        results["gemm"] = section([measurement("Tessera", 1.0, "gflops", "64 x 576 x 1536, 1 thread")])
        page = report.page(results)
        self.assertIn(report.TITLES["engine"], page)
        self.assertIn(report.TITLES["gemm"], page)


class Goals(unittest.TestCase):
    def test_every_cell_with_a_goal_is_measured(self):
        self.assertLessEqual(set(goals.HTTP), {cell.name for cell in serving.CELLS})
        tests = {(model, f"decode {batch}") for model, (_, batches, _) in engine.MODELS.items() for batch in batches}
        tests |= {(model, f"prefill {engine.PROMPT}") for model in engine.MODELS}
        self.assertEqual(set(goals.ENGINE_TWO_THREADS), tests)

    def test_goals_differ_by_threads_rows_and_metric(self):
        self.assertEqual(goals.goal("engine", "llama.cpp", "SmolLM2 bf16, 2 threads, decode 8", "tokens_per_s"), 6.0)
        self.assertEqual(goals.goal("engine", "llama.cpp", "SmolLM2 bf16, 1 thread, decode 8", "tokens_per_s"), 1.3)
        self.assertEqual(goals.goal("gemm", "oneDNN", "8 x 576 x 1536, 2 threads", "gflops"), 1.3)
        self.assertEqual(goals.goal("gemm", "oneDNN", "64 x 576 x 1536, 2 threads", "gflops"), 1.0)
        self.assertIsNone(goals.goal("gemm", "oneDNN", "32 x 576 x 1536, 2 threads", "gflops"))
        cell = "512 in, 128 out, 8 at a time"
        self.assertEqual(goals.goal("http", "vLLM", cell, "tpot_ms"), 2.0)
        self.assertEqual(goals.goal("http", "vLLM", cell, "ttft_ms"), 1.4)
        self.assertIsNone(goals.goal("http", "llama-server", cell, "ttft_ms"))


if __name__ == "__main__":
    unittest.main()
