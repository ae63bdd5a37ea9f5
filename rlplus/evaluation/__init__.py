"""pass@k: sampling, the unbiased estimate, and its intervals (bootstrap over seeds and problems)."""

from rlplus.evaluation.results import Evaluation, join, paired_difference, pooled_pass_at, seeds_below
from rlplus.evaluation.sample import evaluate, evaluate_model, evaluator, validator
from rlplus.evaluation.statistics import Estimate, pass_at_k

__all__ = [
    "Estimate",
    "Evaluation",
    "evaluate",
    "evaluate_model",
    "evaluator",
    "join",
    "paired_difference",
    "pass_at_k",
    "pooled_pass_at",
    "seeds_below",
    "validator",
]
