"""The graders of mathematics, as a configuration makes them."""

from rlplus.common.lazy import import_function
from rlplus.train.config import RewardConfig
from rlplus.train.reward.graders import make_grader

KINDS = ("math_verify", "math_verify_box", "math_verify_strict", "oat")
GRADERS = {
    kind: make_grader(RewardConfig.model_validate({"kind": kind}).model_dump() | {"columns": []}, import_function)
    for kind in KINDS
}
