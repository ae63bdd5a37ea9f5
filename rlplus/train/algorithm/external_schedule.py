"""Schedules of the weight of demonstrations over the steps."""

from dataclasses import dataclass
from math import cos, inf, isfinite, pi, sqrt
from typing import Literal

Shape = Literal["linear", "cosine", "gradient-norm"]


@dataclass(frozen=True)
class ExternalSchedule:
    """The `external_coef` of each step, starting from the objective's.

    - `shape`: "linear", "cosine" (half a period): to `end`, which may be 0, over `steps` steps, and `end` from then on.
      "gradient-norm": external_coef times n_ext / (n_ext + n_int), the norms of the gradients that demonstrated and
      sampled tokens had in the previous step, at a coefficient of 1: demonstrations count as long as the policy is far
      from them. The idea is SASR's (arXiv 2505.13026), whose exact formula is not published clearly: this one is ours.
      A norm belongs to the gradient with respect to the logits, for each token |dloss / dlogprob| (1 - p), which is
      exact to within a factor of sqrt(2)
    - `end`, `steps`: of linear and cosine
    """

    shape: Shape
    end: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        wants = self.shape != "gradient-norm"
        if (self.end is not None, self.steps is not None) != (wants, wants):
            which = "end and steps" if wants else "neither end nor steps"
            raise ValueError(f"shape {self.shape} wants {which}; got end {self.end}, steps {self.steps}")
        if self.end is not None and not (isfinite(self.end) and self.end >= 0):
            raise ValueError(f"want end a finite number >= 0; got {self.end!r}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"want steps >= 1; got {self.steps!r}")

    def coefficient(self, start: float, step: int, external_share: float) -> float:
        """external_coef of step `step` + 1. external_share: n_ext / (n_ext + n_int) of the previous step."""
        if self.end is None or self.steps is None:
            return start * external_share
        done = min(1.0, step / self.steps)
        share = done if self.shape == "linear" else (1 - cos(pi * done)) / 2
        return start + (self.end - start) * share


def external_share(squares_internal: float, squares_external: float, before: float) -> float:
    """n_ext / (n_ext + n_int) from the squared norms; `before` where they are not finite or n_ext is 0."""
    internal, external = sqrt(squares_internal), sqrt(squares_external)
    return external / (internal + external) if external > 0 and internal + external < inf else before
