"""Answer -> score, in worker processes that can be killed: the text is a model's and may hang or exhaust any grader."""

from rlplus.reward.demonstrations import DemonstrationReport, Verdict, grade_demonstrations, keep_passed
from rlplus.reward.scorer import GraderFailed, Scorer
from rlplus.reward.worker_handle import Score, Status

__all__ = [
    "DemonstrationReport",
    "GraderFailed",
    "Score",
    "Scorer",
    "Status",
    "Verdict",
    "grade_demonstrations",
    "keep_passed",
]
