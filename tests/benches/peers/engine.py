"""Prefill and decode in one process: llama.cpp's own benchmarks against `tessera bench engine`."""

import json

import process
from place import many

# Name, file in the models folder, decode batches, and whether weights are quantised.
MODELS = {
    "SmolLM2 bf16": ("SmolLM2-135M-Instruct.BF16.gguf", (1, 8, 32), False),
    "SmolLM2 Q4_1": ("SmolLM2-135M-Instruct.Q4_1.gguf", (1, 8, 32), True),
    "Gemma3-270m Q4_K_M": ("gemma-3-270m-q4_k_m.gguf", (1, 8), True),
}
PROMPT = 512
# Decode runs behind this many tokens of each sequence, and makes so many.
CONTEXT, GENERATED = 128, 32
DEADLINE_S = 900


class LlamaCpp:
    """llama-bench for prefill, llama-batched-bench for decode, in huge pages."""

    name = "llama.cpp"
    # Its repacked weights are faster in some cells and slower in others.
    variants = ("repack", "no repack")

    def __init__(self, place):
        self.place = place

    def measure(self, model, threads, variant):
        """One run of a model: a value for each test."""
        file, batches, _ = MODELS[model]
        path, repack = self.place.model(file), variant != "no repack"
        common = ["-t", threads, "-lm", "none"]
        prefill = ["-m", path, *common, "-p", PROMPT, "-n", 0, "-r", 3, "--repack", int(repack), "-o", "json"]
        tests = {f"prefill {PROMPT}": json.loads(self._run("llama-bench", prefill))[0]["avg_ts"]}
        decode = ["-m", path, *common, "-tb", threads, "-npp", CONTEXT, "-ntg", GENERATED, "--output-format", "jsonl"]
        decode += ["-npl", ",".join(map(str, batches)), "-c", max(batches) * (CONTEXT + GENERATED), "-b", 2048, "-ub", 512]
        decode += [] if repack else ["--no-repack"]
        for line in self._run("llama-batched-bench", decode).splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                tests[f"decode {result['pl']}"] = result["speed_tg"]
        return {test: (value, None) for test, value in tests.items()}

    def _run(self, program, arguments):
        command = [self.place.peers / "llama/bin" / program, *arguments]
        return process.run(command, DEADLINE_S, env=self.place.huge_pages, log=self.place.log(program))


class Tessera:
    """`tessera bench engine`."""

    name = "Tessera"
    # Activations of 8 bits, as llama.cpp has them, and of bf16, which is the default.
    variants = ("int8", "stored")

    def __init__(self, place):
        self.place = place

    def measure(self, model, threads, variant):
        """One run of a model: a value and a bound for each test."""
        file, batches, _ = MODELS[model]
        command = [self.place.tessera, "bench", "engine", "--model", self.place.model(file), "--threads", threads]
        command += ["--dtype", variant or "stored"]
        command += ["--prompt", PROMPT, "--batch", ",".join(map(str, batches)), "--repetitions", 3, "--json"]
        command += ["--context", CONTEXT, "--decode-steps", GENERATED]
        results = json.loads(process.run(command, DEADLINE_S, log=self.place.log("tessera-engine")))
        tests = {}
        for result in results["results"]:
            size = result["tokens"] if result["test"] == "prefill" else result["batch"]
            tests[f"{result['test']} {size}"] = (result["tokens_per_s"]["median"], result["bound_tokens_per_s"])
        return tests


class Section:
    """Every model with every number of threads."""

    def __init__(self, place, options):
        self.subjects = [Tessera(place), LlamaCpp(place)]
        self.models = options.models or list(MODELS)
        self.threads = options.threads
        self.notes = [
            f"prefill {PROMPT}: one prompt of {PROMPT} tokens; decode B: B sequences behind {CONTEXT} tokens each",
            "llama.cpp with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 and load mode none; quantised weights repacked or not: the better one counts",
            "Tessera with quantised weights: activations of 8 bits (`int8`), as llama.cpp has them, or of bf16 (`stored`, the default): the better one counts",
        ]

    def rounds(self, order):
        """Yields (label, function) of one round: subjects in the given order for each model and number of threads."""
        for model in self.models:
            for threads in self.threads:
                for subject in order(self.subjects):
                    variants = subject.variants if MODELS[model][2] else (None,)
                    for variant in variants:
                        label = ", ".join(filter(None, [subject.name, model, many(threads), variant]))
                        yield label, lambda s=subject, m=model, t=threads, v=variant: self.run(s, m, t, v)

    def run(self, subject, model, threads, variant):
        """Measures one subject; returns measurements without their repeat and load."""
        return [
            {
                "cell": f"{model}, {many(threads)}, {test}",
                "metric": "tokens_per_s",
                "subject": subject.name,
                "value": value,
                "bound": bound,
                "variant": variant,
            }
            for test, (value, bound) in subject.measure(model, threads, variant).items()
        ]

    def close(self):
        """Nothing keeps running."""
