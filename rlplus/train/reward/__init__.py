"""Answer -> score, in worker processes that can be killed: the text is a model's and may hang or exhaust any grader.

A grader of your own is a function in a module of the folder that the run starts from. None means "not parsed":

    # sentences.py, for `reward: {function: "sentences:last_word"}`
    def last_word(text, answer):
        words = text.rstrip(". ").split()
        return float(words[-1] == answer) if words else None
"""

from rlplus.train.reward.demonstrations import DemonstrationReport, RewardOrStatus, grade_demonstrations, keep_passed
from rlplus.train.reward.graders.rules import BOX, rules_of
from rlplus.train.reward.scorer import GraderFailed, Scorer, score, shape
from rlplus.train.reward.unreadable import unreadable_answers
from rlplus.train.reward.worker_handle import Score, Status

__all__ = [
    "BOX",
    "DemonstrationReport",
    "GraderFailed",
    "RewardOrStatus",
    "Score",
    "Scorer",
    "Status",
    "grade_demonstrations",
    "keep_passed",
    "rules_of",
    "score",
    "shape",
    "unreadable_answers",
]
