"""The benchmarks that evaluations know by name: the source of their problems and the grader of responses."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. A file of the user's can replace `source`: the column `data.benchmark` selects its rows.

    source: `data.path` of the problems on the hub. layout: name of the function in rlplus/data/benchmarks.py that makes
    a question and an answer of a row there. grader: the reward's `kind`, which evaluation.math_grader replaces for
    mathematics. aliases: other names in files, such as LUFFY's and RL-PLUS's, which are in verl's layout.
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
    """The benchmark that has this name in files; None if unknown."""
    return next((own for own, entry in BENCHMARKS.items() if name in (own, *entry.aliases)), None)
