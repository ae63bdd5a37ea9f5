"""pass@k: sampling, the unbiased estimate, and its intervals (bootstrap over seeds and problems).

The names are imported on first use: a report has results and their intervals without torch.
"""

from typing import TYPE_CHECKING

from rlplus.common.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.train.evaluation.clusters import misleading, note_of, two_groups, unseen
    from rlplus.train.evaluation.estimates import Estimate, pass_at_k
    from rlplus.train.evaluation.results import (
        RESULTS,
        Evaluation,
        join,
        load_results,
        paired_difference,
        pooled_pass_at,
        save_results,
        seeds_below,
    )
    from rlplus.train.evaluation.sample import evaluate, evaluate_benchmarks, evaluate_model
    from rlplus.train.evaluation.table import result_table

__all__ = [
    "RESULTS",
    "Estimate",
    "Evaluation",
    "evaluate",
    "evaluate_benchmarks",
    "evaluate_model",
    "join",
    "load_results",
    "misleading",
    "note_of",
    "paired_difference",
    "pass_at_k",
    "pooled_pass_at",
    "result_table",
    "save_results",
    "seeds_below",
    "two_groups",
    "unseen",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "results": (
            "RESULTS",
            "Evaluation",
            "join",
            "load_results",
            "paired_difference",
            "pooled_pass_at",
            "save_results",
            "seeds_below",
        ),
        "sample": ("evaluate", "evaluate_benchmarks", "evaluate_model"),
        "clusters": ("misleading", "note_of", "two_groups", "unseen"),
        "estimates": ("Estimate", "pass_at_k"),
        "table": ("result_table",),
    },
)
