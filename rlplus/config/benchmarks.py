"""The benchmarks that evaluations know by name: where their problems are and how a response is graded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. A file of the user's takes the place of `source`: its rows are found by `data.benchmark`.

    source: `data.path` of the problems on the hub. layout: how a row there becomes a question and an answer, by the
    name in rlplus/data/benchmarks.py. grader: the reward's `kind`; for mathematics evaluation.math_grader takes its
    place. aliases: further names in files, such as LUFFY's and RL-PLUS's, which are in verl's layout.
    """

    source: str
    layout: str
    grader: str
    aliases: tuple[str, ...] = ()

    @property
    def mathematical(self) -> bool:
        return self.grader == "math_verify"


def _math(source: str, *aliases: str) -> Benchmark:
    return Benchmark(source, "math", "math_verify", aliases)


# The six of the paper's Table 1, then those of its Table 2. lkevinzc/math-eval is the evaluation suite of Oat-Zero.
BENCHMARKS = {
    "aime24": _math("hf://lkevinzc/math-eval/aime", "aime"),
    "aime25": _math("hf://math-ai/aime25/test"),
    "amc": _math("hf://lkevinzc/math-eval/amc"),
    "math500": _math("hf://lkevinzc/math-eval/math", "math"),
    "minerva": _math("hf://lkevinzc/math-eval/minerva"),
    "olympiadbench": _math("hf://lkevinzc/math-eval/olympiad_bench", "olympiad_bench"),
    "humaneval": Benchmark("hf://openai/openai_humaneval/test", "humaneval", "code"),
    "leetcode": Benchmark("hf://davidheineman/deepseek-leetcode/test", "leetcode", "code"),
    "livecodebench": Benchmark("hf://livecodebench/code_generation_lite/test.jsonl", "livecodebench", "code"),
    "arc_c": Benchmark("hf://allenai/ai2_arc/ARC-Challenge/test", "arc", "choice"),
    "gpqa_diamond": Benchmark("hf://Idavidrein/gpqa/gpqa_diamond/train", "gpqa", "choice", ("gpqa",)),
    "mmlu_pro": Benchmark("hf://TIGER-Lab/MMLU-Pro/test", "mmlu_pro", "choice"),
}


def benchmark_name(name: str) -> str | None:
    """The benchmark that a file means by this name; None for an unknown one."""
    return next((own for own, entry in BENCHMARKS.items() if name in (own, *entry.aliases)), None)
