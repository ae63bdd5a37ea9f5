"""The fields of an objective, and the published algorithms' objectives as presets.

A surrogate of your own is a function of the logprobs and `TokenConstants`. It returns the tokens' losses and their
derivatives with respect to logprob, see `register_token_loss`:

    # drift.py, for `algorithm: {objective: {internal: "drift.py:drift"}}`
    def drift(logprob, constants):
        change = logprob - constants.old_logprob
        loss = -constants.advantage * change.exp()
        return loss + change**2 / 2, loss + change
"""

import operator
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, TypeGuard

from rlplus.common.errors import check_name
from rlplus.loss.objective.surrogates import EXTERNAL, INTERNAL, find_token_loss

KL_ESTIMATORS = ("k2", "k3", "k3-unbiased")
MISMATCH_MODES = ("truncate", "mask")
Reduction = Literal["token", "sequence", "constant", "official"]
PresetName = Literal[  # the keys of OBJECTIVES (tested), for editors and type checkers
    "rlplus", "rlplus-no-eba", "rlplus-no-mis", "rlplus-proxy", "rlplus-omega", "rlplus-bayes", "rlplus-official",
    "rlplus-official-no-eba", "rlplus-official-no-mis", "rlplus-official-proxy", "rlplus-official-omega",
    "rlplus-official-bayes", "luffy", "exgrpo", "grpo", "grpo-official", "grpo-sft", "relift", "hpt", "superrl",
    "uft", "prefix-rft", "bread", "srft", "chord", "dr-grpo", "pope", "dapo", "simplerl", "ppo", "prime", "gspo",
    "cispo", "sapo", "dppo", "gkd", "opd", "opsd", "sdft", "sdpo", "sft", "dft",
]  # fmt: skip
AdvantageEstimator = Literal["group", "leave-one-out", "batch", "group-batch", "batch-std", "mean", "pass@k"]

# The ranges of the fields of an objective, in the words of JSON schema.
RANGES: dict[str, dict[str, float]] = {
    "external_coef": {"exclusiveMinimum": 0},
    "gamma": {"minimum": 0},
    "mixture_share": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "kappa": {"exclusiveMinimum": 0},
    "clip_low": {"minimum": 0},
    "clip_high": {"minimum": 0},
    "dual_clip": {"exclusiveMinimum": 1},
    "ratio_cap": {"minimum": 1},
    "tau_pos": {"exclusiveMinimum": 0},
    "tau_neg": {"exclusiveMinimum": 0},
    "kl_coef": {"minimum": 0},
    "entropy_coef": {},
    "mismatch_cap": {"exclusiveMinimum": 0},
    "mismatch_low": {"minimum": 0},
}
_BOUNDS = {
    "minimum": (">=", operator.ge),
    "exclusiveMinimum": (">", operator.gt),
    "exclusiveMaximum": ("<", operator.lt),
}
_DOCUMENTED = {"use_attribute_docstrings": True}  # pydantic makes configs/schema.json with it


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


@dataclass(frozen=True)
class Objective:
    """The loss of a token as a function of its logprob and per-token constants.

    Sampled (internal) and demonstrated (external) tokens each have a surrogate g(logprob); a token's loss is
    -advantage * g. The formulas are in `surrogates.py`. Change fields with `dataclasses.replace`.
    """

    __pydantic_config__ = _DOCUMENTED

    internal: str = "ratio"
    """The surrogate of sampled tokens: "ratio" (RL-PLUS), "clip" (PPO, GRPO, DAPO), "reinforce", "cispo" (MiniMax-M1),
    "sapo", "dppo", or the name of a `register_token_loss`."""
    external: str = "mis"
    """The surrogate of demonstrated tokens: "mis" (RL-PLUS eq. 4 with the Bayes-optimal estimate), "proxy", "omega",
    "bayes" (the paper's ablations), "shaped" (LUFFY, ExGRPO), "nll" (supervised), "dft" (supervised, weighted by p) or
    "none". The supervised ones ignore the advantage."""
    external_coef: float = 1.0
    """Factor of the external loss."""
    gamma: float = 0.5
    """Exponent of the exploration weight (1 - p)^gamma on external tokens (RL-PLUS eq. 6); 0 = off."""
    mixture_share: float = 0.5
    """Share of demonstrations in the mixture of "mis"; 1/2 in the paper."""
    kappa: float = 0.1
    """LUFFY's shaping constant, for "shaped"."""
    clip_low: float = 0.2
    """For "clip": the ratio is clipped to [1 - clip_low, 1 + clip_high]. For "dppo": a token whose probability rose by
    more than clip_high, or fell by more than clip_low, where the advantage asks for more of it, has no loss."""
    clip_high: float = 0.2
    """See clip_low. For "cispo": the detached ratio is at most 1 + clip_high."""
    dual_clip: float | None = None
    """Lower bound c * advantage on the objective of a negative advantage, for "clip"; null = off."""
    ratio_cap: float = 20.0
    """The detached ratio is at most this, for "dppo"."""
    tau_pos: float = 1.0
    """Temperature of the gate of positive advantages, for "sapo"."""
    tau_neg: float = 1.05
    """Temperature of the gate of other advantages, for "sapo"."""
    kl_coef: float = 0.0
    """Coefficient of the estimate of KL(policy || reference); needs `ref_logprob`."""
    kl_estimator: str = "k3"
    """The estimator: "k2", "k3" (GRPO) or "k3-unbiased" (DeepSeek-V3.2; TRL's default). Only the gradients of k2 on
    samples of the current policy, and of k3-unbiased, are the KL divergence's."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    mismatch_cap: float | None = None
    """Internal surrogates are weighted by w = exp(old_logprob - engine_logprob), which has this upper bound; null = no
    weight."""
    mismatch_low: float = 0.0
    """Lower bound of w."""
    mismatch_mode: str = "truncate"
    """Use of w's bounds: "truncate" clamps w; "mask" removes the surrogate of tokens with w outside (IcePop)."""

    def __post_init__(self) -> None:
        find_token_loss(self.internal)
        check_name("internal surrogate", self.internal, INTERNAL)
        check_name("external surrogate", self.external, EXTERNAL)
        if self.kl_estimator == "k1":
            raise ValueError(
                "want kl_estimator k2, k3 or k3-unbiased; got k1, which as a loss has an expected gradient of 0"
            )
        check_name("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_name("mismatch_mode", self.mismatch_mode, MISMATCH_MODES)
        for field, bounds in RANGES.items():
            value = getattr(self, field)
            if value is None and field in ("dual_clip", "mismatch_cap"):
                continue
            if not is_number(value) or not all(_BOUNDS[kind][1](value, bound) for kind, bound in bounds.items()):
                wanted = " and ".join(f"{_BOUNDS[kind][0]} {bound:g}" for kind, bound in bounds.items())
                raise ValueError(f"want {field} a finite number {wanted}".rstrip() + f"; got {value!r}")
        if self.mismatch_cap is not None and self.mismatch_low >= self.mismatch_cap:
            raise ValueError(f"want mismatch_low < mismatch_cap; got {self.mismatch_low:g} and {self.mismatch_cap:g}")

    def external_gradient(self, advantage: float) -> bool:
        """Whether a demonstrated token with this advantage can have a gradient, KL and entropy aside."""
        surrogate = EXTERNAL[self.external]
        return surrogate.terms is not None and (advantage != 0 or not surrogate.weighted)

    @classmethod
    def preset(cls, name: PresetName) -> "Objective":
        """The objective of a published algorithm, one of `OBJECTIVES`; ValueError names the nearest one."""
        return find_objective(name)


def find_objective(name: str) -> Objective:
    """`Objective.preset` of a name that no type checker has seen, such as a configuration's."""
    check_name("objective", name, OBJECTIVES)
    return OBJECTIVES[name]


def _rollouts(internal: str, **fields: Any) -> Objective:
    """An objective of sampled tokens only."""
    return Objective(internal, "none", gamma=0.0, **fields)


# RL-PLUS and its ablations. -no-eba: no exploration weight; -no-mis: plain importance sampling; the last three are the
# estimators of the paper's analysis.
RLPLUS = {
    "rlplus": Objective(),
    "rlplus-no-eba": Objective(gamma=0.0),
    "rlplus-no-mis": Objective(external="omega"),
    "rlplus-proxy": Objective(external="proxy", gamma=0.0),
    "rlplus-omega": Objective(external="omega", gamma=0.0),
    "rlplus-bayes": Objective(external="bayes", gamma=0.0),
}
_SCRIPTS = 1e-3  # the entropy bonus of the RL-PLUS and LUFFY scripts
_NLL = Objective(external="nll", gamma=0.0)

OBJECTIVES: dict[str, Objective] = {
    **RLPLUS,
    **{
        name.replace("rlplus", "rlplus-official"): replace(objective, entropy_coef=_SCRIPTS)
        for name, objective in RLPLUS.items()
    },
    "luffy": Objective(external="shaped", gamma=0.0, entropy_coef=_SCRIPTS),
    "exgrpo": Objective(external="shaped", gamma=0.0, entropy_coef=_SCRIPTS),
    "grpo": _rollouts("clip"),
    "grpo-official": _rollouts("clip", entropy_coef=_SCRIPTS),
    "grpo-sft": replace(_NLL, entropy_coef=_SCRIPTS),
    "relift": replace(_NLL, entropy_coef=_SCRIPTS),
    "hpt": replace(_NLL, entropy_coef=_SCRIPTS),
    "superrl": replace(_NLL, internal="clip"),
    "uft": replace(_NLL, internal="clip", external_coef=1e-3, kl_coef=1e-3),
    # The clip of prefixes is a switch of the authors' code (enable_clip); the dual clip is in the code only.
    "prefix-rft": Objective("clip", "proxy", gamma=0.0, dual_clip=3.0),
    "bread": _rollouts("clip", kl_coef=1e-3),
    "srft": Objective("reinforce", "shaped", gamma=0.0, entropy_coef=_SCRIPTS),
    # Its loss is (1 - mu) times the rollouts' plus mu times the demonstrations', with mu = .1.
    "chord": Objective("clip", "dft", external_coef=1 / 9, gamma=1.0),
    "dr-grpo": _rollouts("clip"),
    "pope": _rollouts("clip"),
    # The authors' code has the dual clip; the paper's formula has none.
    "dapo": _rollouts("clip", clip_high=0.28, dual_clip=10.0),
    "simplerl": _rollouts("clip", kl_coef=1e-4, entropy_coef=1e-3),  # kl_coef is 1e-3 above 14B
    "ppo": _rollouts("clip"),
    "prime": _rollouts("clip"),
    "gspo": _rollouts("clip", clip_low=3e-4, clip_high=4e-4),
    "cispo": _rollouts("cispo", clip_high=4.0),  # ScaleRL has at most 5 (arXiv 2510.13786)
    "sapo": _rollouts("sapo"),
    "dppo": _rollouts("dppo"),
    # Read where the recipe's loss is "sampled".
    **dict.fromkeys(("gkd", "opd", "opsd", "sdft", "sdpo"), _rollouts("ratio")),
    "sft": _NLL,
    "dft": Objective(external="dft", gamma=0.0),
}
"""The objectives of the presets, by name."""
