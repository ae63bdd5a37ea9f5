"""An objective and everything else that defines an algorithm; the published ones as presets."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from rlplus.common.errors import check_name
from rlplus.loss.objective.objective import OBJECTIVES, RLPLUS, AdvantageEstimator, Objective, Reduction
from rlplus.train.algorithm.distillation_options import Distill, SelfDistill
from rlplus.train.algorithm.external_schedule import ExternalSchedule
from rlplus.train.algorithm.options import (
    PLAIN,
    Critic,
    EntropyWeights,
    Gate,
    Interleaved,
    Prefix,
    PrefixSearch,
    ProcessReward,
    Refill,
    Replay,
    Shaping,
)
from rlplus.train.algorithm.recipe_base import RecipeOptions

RatioLevel = Literal["token", "sequence"]
MismatchLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Algorithm:
    """An objective and everything else that defines an algorithm.

    - `reduction`: the normaliser, see `token_weights`
    - `advantage`: what a reward is compared with, see `batch_advantages`
    - `advantage_k`: k of advantage "pass@k"
    - `normalize_std`: whether advantages of "group" are divided by the group's standard deviation
    - `demonstrations`: "none"; "group": a demonstration is a member of its group; "apart": it is excluded from the
      group's statistics and has separate denominators, but still replaces a rollout unless the recipe says otherwise
      (`in_place`); "only": no rollouts at all
    - `external_reduction`: the normaliser of demonstrations, whose denominators then leave out sampled tokens: each
      kind has its own mean, as in RL-PLUS eq. 7. None = `reduction`, over both kinds together unless demonstrations are
      "apart"
    - `ratio_level`: "token", or "sequence" (GSPO, arXiv 2507.18071): the geometric mean of the sequence's ratios
    - `mismatch_level`: the mismatch weight of a "token", the product over its "sequence", or their "geometric" mean
    - `top_entropy`: the share of sampled tokens that has a surrogate: those with the highest entropy
    - `external_top_entropy`: the same of demonstrated tokens, whose surrogate is one of an advantage
    - `external_schedule`: how the objective's external_coef changes from step to step; None = constant
    - `recipe`: options of one of `RECIPES`: what a step does around the objective
    - `refill`: which groups are dropped and replaced by new draws; None = each step trains on one draw
    - `shaping`: changes to the grader's reward before advantages are computed; None = no change
    - `skip_grad_norm`: updates whose gradient has a larger global norm are skipped; 0 = off
    - `reward_kl_coef`: factor of a KL penalty: this times k1 = log p - log p_ref, under the policy that sampled, is
      subtracted from the reward of each sampled token, or, in recipes without token rewards, its sum from the
      response's reward; 0 = off

    Any of ratio_level, mismatch_level and the top entropies adds one forward pass before an update, several of them
    together also one; ratio_level adds none before the first update on samples of the current policy, where every ratio
    is 1.
    """

    objective: Objective
    reduction: Reduction = "token"
    normalize_std: bool = True
    demonstrations: Literal["none", "group", "apart", "only"] = "group"
    external_reduction: Reduction | None = None
    ratio_level: RatioLevel = "token"
    mismatch_level: MismatchLevel = "token"
    top_entropy: float = 1.0
    external_top_entropy: float = 1.0
    advantage: AdvantageEstimator = "group"
    advantage_k: int = 4
    external_schedule: ExternalSchedule | None = None
    recipe: RecipeOptions = PLAIN
    refill: Refill | None = None
    shaping: Shaping | None = None
    skip_grad_norm: float = 0.0
    reward_kl_coef: float = 0.0

    def at_step(self, step: int, external_share: float = 1.0) -> "Algorithm":
        """The algorithm in the step after `step` others; `external_share` as for `ExternalSchedule.coefficient`."""
        if self.external_schedule is None:
            return self
        coefficient = self.external_schedule.coefficient(self.objective.external_coef, step, external_share)
        changes: dict[str, Any] = {"external_coef": coefficient} if coefficient else {"external": "none"}
        return replace(self, objective=replace(self.objective, **changes))

    @property
    def selects_tokens(self) -> bool:
        """Whether only the tokens of the highest entropy have a surrogate."""
        return self.top_entropy < 1 or (self.external_top_entropy < 1 and self.recipe.trains_demonstrations)

    @property
    def generates(self) -> bool:
        """Whether rollouts are sampled."""
        return self.demonstrations != "only"

    @property
    def needs_reference(self) -> bool:
        """Whether the model that the run starts from is needed, for its logprobs or as a teacher."""
        return bool(self.objective.kl_coef or self.reward_kl_coef or self.recipe.copied_teacher)

    @property
    def demonstrates(self) -> bool:
        """Whether demonstrations are trained on."""
        return self.demonstrations != "none"

    @property
    def needs_demonstrations(self) -> bool:
        """Whether these are the data's, and not the policy's own of earlier steps."""
        return self.demonstrates and not self.recipe.replays

    @property
    def demonstrates_in_place(self) -> bool:
        """Whether a demonstration replaces a rollout of its group."""
        return self.demonstrates and self.recipe.in_place

    @property
    def demonstrations_apart(self) -> bool:
        """Whether demonstrations are excluded from the groups' statistics and have separate denominators."""
        return self.demonstrations == "apart"

    @property
    def separate_denominators(self) -> bool:
        """Whether sampled and demonstrated tokens are normalised each by their own number."""
        return self.demonstrations_apart or self.external_reduction is not None


def _group(name: str, **fields: Any) -> Algorithm:
    """The algorithm around the objective of that name, in which demonstrations are members of their groups."""
    return Algorithm(OBJECTIVES[name], **fields)


def _official(name: str, **fields: Any) -> Algorithm:
    """The settings of the RL-PLUS and LUFFY scripts: sums over a fixed length, no std."""
    return Algorithm(OBJECTIVES[name], "official", normalize_std=False, **fields)


def _official_sft(name: str, **fields: Any) -> Algorithm:
    """`_official` with demonstrations apart, whose loss is the mean of -log p over their tokens."""
    return _official(name, demonstrations="apart", external_reduction="token", **fields)


def _rollouts_only(name: str, reduction: Reduction, **fields: Any) -> Algorithm:
    return Algorithm(OBJECTIVES[name], reduction, demonstrations="none", **fields)


ALGORITHMS: dict[str, Algorithm] = {
    **{name: _group(name) for name in RLPLUS},
    **{name: _official(name) for name in (each.replace("rlplus", "rlplus-official") for each in RLPLUS)},
    "luffy": _official("luffy"),
    "exgrpo": _official("exgrpo", recipe=Replay(), skip_grad_norm=500.0),
    "grpo": _rollouts_only("grpo", "sequence"),
    "grpo-official": _rollouts_only("grpo-official", "official", normalize_std=False),
    "grpo-sft": _official_sft("grpo-sft"),
    "relift": _official_sft("relift", recipe=Interleaved()),
    "hpt": _official_sft("hpt", recipe=Gate(), skip_grad_norm=80.0),
    "superrl": Algorithm(OBJECTIVES["superrl"], "sequence", demonstrations="apart", recipe=Gate()),
    "uft": Algorithm(OBJECTIVES["uft"], demonstrations="apart", recipe=Prefix()),
    "prefix-rft": _group(
        "prefix-rft",
        reduction="constant",
        normalize_std=False,
        external_top_entropy=0.2,
        recipe=Prefix(schedule="window", steps=500, members=1),
    ),
    "bread": _group("bread", reduction="sequence", recipe=PrefixSearch()),
    # The std is in its paper's eq. 7; the normaliser, which the paper leaves open, is LUFFY's, on whose code it builds.
    "srft": _group("srft", reduction="official", recipe=EntropyWeights()),
    "chord": Algorithm(OBJECTIVES["chord"], demonstrations="apart"),
    "dr-grpo": _rollouts_only("dr-grpo", "constant", normalize_std=False),
    "pope": _rollouts_only("pope", "sequence", normalize_std=False),
    "dapo": _rollouts_only(
        *("dapo", "token"),
        refill=Refill(),
        shaping=Shaping(wrong=-1.0, overlong=0.2),  # 4,096 of 20,480 tokens
    ),
    "simplerl": _rollouts_only("simplerl", "token"),
    # Open-Reasoner-Zero, arXiv 2503.24290: its mean is over a packed row of 16,384 tokens.
    "ppo": _rollouts_only("ppo", "token", recipe=Critic()),
    "prime": _rollouts_only(
        *("prime", "sequence"),  # a mean over a micro-batch, which in its run is one sequence
        recipe=ProcessReward(),
        refill=Refill(low=0.2, high=0.8, max_draws=4, fill=True),  # the bounds are PRIME's, the rest verl's
    ),
    "gspo": _rollouts_only("gspo", "sequence", ratio_level="sequence"),
    "cispo": _rollouts_only("cispo", "token"),
    "sapo": _rollouts_only("sapo", "sequence"),
    "dppo": _rollouts_only("dppo", "token", normalize_std=False),
    "gkd": _rollouts_only("gkd", "token", recipe=Distill(loss="jsd")),
    "opd": _rollouts_only("opd", "token", recipe=Distill(loss="sampled")),
    "opsd": _rollouts_only("opsd", "token", recipe=SelfDistill(teacher="initial", loss="jsd")),
    "sdft": _rollouts_only(
        *("sdft", "sequence"),  # the divergence is the code's, of which the results are; the paper has the reverse one
        recipe=SelfDistill(teacher="average", teacher_update_rate=0.01, loss="forward_kl"),
    ),
    "sdpo": _rollouts_only("sdpo", "token", recipe=SelfDistill(teacher="average", loss="jsd", shows="response")),
    "sft": Algorithm(OBJECTIVES["sft"], demonstrations="only"),
    "dft": Algorithm(OBJECTIVES["dft"], demonstrations="only"),
}


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name; ValueError names the nearest one."""
    check_name("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
