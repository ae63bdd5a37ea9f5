"""Models under DeepSpeed, and the micro-batches that they are trained on.

Importing this package loads nothing; a name is imported on first use. DeepSpeed comes with the trainable models only.
"""

from typing import TYPE_CHECKING

from rlplus.common.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.train.learner.batch import by_sample, forward_batches, has_gradient, make_micro_batches, mean_batches
    from rlplus.train.learner.dropout import say_dropout
    from rlplus.train.learner.learner import Learner, Optimization
    from rlplus.train.learner.moving_average import MovingAverage
    from rlplus.train.learner.policy import Policy
    from rlplus.train.learner.pretrained import (
        check_positions,
        existing_model,
        prepare_model,
        weights_fingerprint,
        write_pretrained,
    )
    from rlplus.train.learner.recipe_models import ProcessModel, ValueModel
    from rlplus.train.learner.served_teacher import GivenTeacher, ServedTeacher
    from rlplus.train.learner.stored_teacher import StoredTeacher
    from rlplus.train.learner.teacher import SelfTeacher, Teacher, divergence_of

__all__ = [
    "GivenTeacher",
    "Learner",
    "MovingAverage",
    "Optimization",
    "Policy",
    "ProcessModel",
    "SelfTeacher",
    "ServedTeacher",
    "StoredTeacher",
    "Teacher",
    "ValueModel",
    "by_sample",
    "check_positions",
    "divergence_of",
    "existing_model",
    "forward_batches",
    "has_gradient",
    "make_micro_batches",
    "mean_batches",
    "prepare_model",
    "say_dropout",
    "weights_fingerprint",
    "write_pretrained",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "batch": ("by_sample", "forward_batches", "has_gradient", "make_micro_batches", "mean_batches"),
        "dropout": ("say_dropout",),
        "learner": ("Learner", "Optimization"),
        "moving_average": ("MovingAverage",),
        "policy": ("Policy",),
        "pretrained": (
            "check_positions",
            "existing_model",
            "prepare_model",
            "weights_fingerprint",
            "write_pretrained",
        ),
        "recipe_models": ("ProcessModel", "ValueModel"),
        "served_teacher": ("GivenTeacher", "ServedTeacher"),
        "stored_teacher": ("StoredTeacher",),
        "teacher": ("SelfTeacher", "Teacher", "divergence_of"),
    },
)
