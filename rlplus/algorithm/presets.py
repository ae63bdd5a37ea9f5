"""The fields of an objective, and the published algorithms as presets."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from rlplus.algorithm.external_schedule import ExternalSchedule
from rlplus.algorithm.options import (
    PLAIN,
    Critic,
    Gate,
    Interleaved,
    Prefix,
    ProcessReward,
    RecipeOptions,
    Refill,
    Replay,
    Shaping,
    is_number,
)
from rlplus.errors import nearest
from rlplus.loss.registered import find_token_loss
from rlplus.loss.surrogates import EXTERNAL, INTERNAL

KL_ESTIMATORS = ("k2", "k3", "k3-unbiased")
MISMATCH_MODES = ("truncate", "mask")
Reduction = Literal["token", "sequence", "constant", "official"]
AdvantageEstimator = Literal["group", "leave-one-out", "batch", "group-batch", "batch-std", "mean", "pass@k"]
RatioLevel = Literal["token", "sequence"]
MismatchLevel = Literal["token", "sequence", "geometric"]


def _check_name(what: str, name: object, valid: tuple[str, ...]) -> None:
    if name not in valid:
        near = nearest(str(name), valid)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise ValueError(f"want {what} one of {', '.join(valid)}; got {name!r}{hint}")


@dataclass(frozen=True)
class Objective:
    """The loss of a token as a function of its logprob and per-token constants.

    Sampled (internal) and demonstrated (external) tokens each have a surrogate g(logprob); a token's loss is
    -advantage * g. The formulas are in `surrogates.py`. Change fields with `dataclasses.replace`.

    internal       "ratio" (RL-PLUS), "clip" (PPO, GRPO, DAPO), "reinforce", "cispo" (MiniMax-M1), "sapo", "dppo",
                   or the name of a `register_token_loss`
    external       "mis" (RL-PLUS eq. 4 with the Bayes-optimal estimate), "proxy", "omega", "bayes" (the paper's
                   ablations), "shaped" (LUFFY, ExGRPO), "nll" (supervised), "dft" (supervised, weighted by p) or
                   "none"; the supervised ones ignore the advantage
    external_coef  factor of the external loss
    gamma          exponent of the exploration weight (1 - p)^gamma on external tokens (RL-PLUS eq. 6); 0 = off
    mixture_share  share of demonstrations in the mixture of "mis", between 0 and 1; 1/2 in the paper
    kappa          LUFFY's shaping constant, for "shaped"
    clip_low, clip_high   "clip": the ratio is clipped to [1 - clip_low, 1 + clip_high]; "cispo": the detached ratio is
                   at most 1 + clip_high; "dppo": a token whose probability rose by more than clip_high, or fell by more
                   than clip_low, where the advantage asks for more of it, has no loss
    dual_clip      lower bound c * advantage on the objective of a negative advantage, c > 1, for "clip"; None = off
    ratio_cap      the detached ratio is at most this, 1 or more, for "dppo"
    tau_pos, tau_neg   temperatures of the gate of positive and of other advantages, for "sapo"
    kl_coef        coefficient of the estimate of KL(policy || reference); needs `ref_logprob`
    kl_estimator   "k2", "k3" (GRPO) or "k3-unbiased" (DeepSeek-V3.2; TRL's default): only the gradients of k2 on
                   samples of the current policy, and of k3-unbiased, are those of the KL divergence
    entropy_coef   coefficient of the entropy bonus
    mismatch_cap   internal surrogates are weighted by w = exp(old_logprob - engine_logprob), which has this upper
                   bound; None = no weight
    mismatch_low   lower bound of w
    mismatch_mode  "truncate": w is clamped to its bounds; "mask": tokens with w outside have no surrogate (IcePop)
    """

    internal: str = "ratio"
    external: str = "mis"
    external_coef: float = 1.0
    gamma: float = 0.5
    mixture_share: float = 0.5
    kappa: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio_cap: float = 20.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    mismatch_cap: float | None = None
    mismatch_low: float = 0.0
    mismatch_mode: str = "truncate"

    def __post_init__(self) -> None:
        find_token_loss(self.internal)
        _check_name("internal surrogate", self.internal, tuple(INTERNAL))
        _check_name("external surrogate", self.external, tuple(EXTERNAL))
        if self.kl_estimator == "k1":
            raise ValueError(
                "want kl_estimator k2, k3 or k3-unbiased; got k1, which as a loss has an expected gradient of 0"
            )
        _check_name("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _check_name("mismatch_mode", self.mismatch_mode, MISMATCH_MODES)
        for field, low, strict in (
            ("external_coef", 0.0, True),
            ("gamma", 0.0, False),
            ("mixture_share", 0.0, True),
            ("kappa", 0.0, True),
            ("clip_low", 0.0, False),
            ("clip_high", 0.0, False),
            ("dual_clip", 1.0, True),
            ("ratio_cap", 1.0, False),
            ("tau_pos", 0.0, True),
            ("tau_neg", 0.0, True),
            ("kl_coef", 0.0, False),
            ("entropy_coef", None, False),
            ("mismatch_cap", 0.0, True),
            ("mismatch_low", 0.0, False),
        ):
            value = getattr(self, field)
            if value is None and field in ("dual_clip", "mismatch_cap"):
                continue
            if not is_number(value) or (low is not None and (value <= low if strict else value < low)):
                bound = "" if low is None else f" {'>' if strict else '>='} {low:g}"
                raise ValueError(f"want {field} a finite number{bound}; got {value!r}")
        if self.mixture_share >= 1:
            raise ValueError(f"want mixture_share < 1; got {self.mixture_share!r}")
        if self.mismatch_cap is not None and self.mismatch_low >= self.mismatch_cap:
            raise ValueError(f"want mismatch_low < mismatch_cap; got {self.mismatch_low:g} and {self.mismatch_cap:g}")

    def external_gradient(self, advantage: float) -> bool:
        """Whether a demonstrated token with this advantage can have a gradient, KL and entropy aside."""
        surrogate = EXTERNAL[self.external]
        return surrogate.terms is not None and (advantage != 0 or not surrogate.weighted)

    @classmethod
    def preset(cls, name: str) -> "Objective":
        """The objective of a published algorithm; `ALGORITHMS` lists the names."""
        return algorithm(name).objective


@dataclass(frozen=True)
class Algorithm:
    """An objective and everything else that defines an algorithm.

    reduction        the normaliser, see `token_weights`
    advantage        what a reward is compared with, see `batch_advantages`
    advantage_k      k of advantage "pass@k"
    normalize_std    whether advantages of "group" are divided by the group's standard deviation
    demonstrations   "none"; "group": a demonstration is a member of its group; "apart": it is excluded from the
                     group's statistics and has separate denominators, but still replaces a rollout unless the recipe
                     says otherwise (`in_place`); "only": no rollouts at all
    external_reduction   the normaliser of demonstrations, whose denominators are then separate from those of sampled
                     tokens: each kind has its own mean, as in RL-PLUS eq. 7. None = `reduction`, over both kinds
                     together unless demonstrations are "apart"
    ratio_level      "token", or "sequence" (GSPO, arXiv 2507.18071): the geometric mean of the sequence's ratios
    mismatch_level   the mismatch weight of a "token", the product over its "sequence", or their "geometric" mean
    top_entropy      the share of sampled tokens that has a surrogate: those with the highest entropy
    external_schedule  how the objective's external_coef changes from step to step; None = constant
    recipe           options of one of `RECIPES`: what a step does around the objective
    refill           which groups are dropped and replaced by new draws; None = each step trains on one draw
    shaping          changes to the grader's reward before advantages are computed; None = no change
    skip_grad_norm   updates whose gradient has a larger global norm are skipped; 0 = off
    reward_kl_coef   factor of a KL penalty: this times k1 = log p - log p_ref, under the policy that sampled, is
                     subtracted from the reward of each sampled token, or, in recipes without token rewards, its sum
                     from the response's reward; 0 = off
    Any of ratio_level, mismatch_level and top_entropy adds one forward pass before an update, several of them together
    also one; ratio_level adds none before the first update on samples of the current policy, where every ratio is 1.
    """

    objective: Objective
    reduction: Reduction = "token"
    normalize_std: bool = True
    demonstrations: Literal["none", "group", "apart", "only"] = "group"
    external_reduction: Reduction | None = None
    ratio_level: RatioLevel = "token"
    mismatch_level: MismatchLevel = "token"
    top_entropy: float = 1.0
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
    def generates(self) -> bool:
        """Whether rollouts are sampled."""
        return self.demonstrations != "only"

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs under the model that the run starts from are needed."""
        return bool(self.objective.kl_coef or self.reward_kl_coef)

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


def _rollouts_only(internal: str, reduction: Reduction, normalize_std: bool = True, **fields: Any) -> Algorithm:
    return Algorithm(Objective(internal, "none", gamma=0.0, **fields), reduction, normalize_std, "none")


# RL-PLUS and its ablations, as changes to the paper's objective. -no-eba: no exploration weight; -no-mis: plain
# importance sampling; the last three are the estimators of the paper's analysis.
_RLPLUS: dict[str, dict[str, Any]] = {
    "": {},
    "-no-eba": {"gamma": 0.0},
    "-no-mis": {"external": "omega"},
    "-proxy": {"external": "proxy", "gamma": 0.0},
    "-omega": {"external": "omega", "gamma": 0.0},
    "-bayes": {"external": "bayes", "gamma": 0.0},
}


def _official(**fields: Any) -> Algorithm:
    """The settings of the RL-PLUS and LUFFY scripts: sums over a fixed length, no std, an entropy bonus."""
    return Algorithm(Objective(entropy_coef=1e-3, **fields), "official", normalize_std=False)


def _official_sft(recipe: RecipeOptions = PLAIN) -> Algorithm:
    """`_official` with demonstrations apart, whose loss is the mean of -log p over their tokens."""
    algorithm = _official(external="nll", gamma=0.0)
    return replace(algorithm, demonstrations="apart", external_reduction="token", recipe=recipe)


ALGORITHMS: dict[str, Algorithm] = {
    **{f"rlplus{name}": Algorithm(Objective(**changes)) for name, changes in _RLPLUS.items()},
    **{f"rlplus-official{name}": _official(**changes) for name, changes in _RLPLUS.items()},
    "luffy": _official(external="shaped", gamma=0.0),
    "exgrpo": replace(_official(external="shaped", gamma=0.0), recipe=Replay(), skip_grad_norm=500.0),
    "grpo": _rollouts_only("clip", "sequence"),
    "grpo-official": _rollouts_only("clip", "official", normalize_std=False, entropy_coef=1e-3),
    "grpo-sft": _official_sft(),
    "relift": _official_sft(Interleaved()),
    "hpt": replace(_official_sft(Gate()), skip_grad_norm=80.0),
    "superrl": Algorithm(Objective("clip", "nll", gamma=0.0), "sequence", demonstrations="apart", recipe=Gate()),
    "uft": Algorithm(
        Objective("clip", "nll", external_coef=1e-3, gamma=0.0, kl_coef=1e-3), demonstrations="apart", recipe=Prefix()
    ),
    # Its loss is (1 - mu) times that of rollouts plus mu times that of demonstrations, with mu = .1.
    "chord": Algorithm(Objective("clip", "dft", external_coef=1 / 9, gamma=1.0), demonstrations="apart"),
    "dr-grpo": _rollouts_only("clip", "constant", normalize_std=False),
    # The dual clip is that of the authors' code; the paper's formula has none.
    "dapo": replace(
        _rollouts_only("clip", "token", clip_high=0.28, dual_clip=10.0),
        refill=Refill(),
        shaping=Shaping(wrong=-1.0, overlong=0.2),  # 4,096 of 20,480 tokens
    ),
    "simplerl": _rollouts_only("clip", "token", kl_coef=1e-4, entropy_coef=1e-3),  # above 14B: kl_coef 1e-3
    # Open-Reasoner-Zero, arXiv 2503.24290: its mean is over a packed row of 16,384 tokens.
    "ppo": replace(_rollouts_only("clip", "token"), recipe=Critic()),
    "prime": replace(
        _rollouts_only("clip", "sequence"),  # a mean over a micro-batch, which in its run is one sequence
        recipe=ProcessReward(),
        refill=Refill(0.2, 0.8, max_draws=4, fill=True),  # the bounds are PRIME's, the rest is verl's recipe of it
    ),
    "gspo": replace(_rollouts_only("clip", "sequence", clip_low=3e-4, clip_high=4e-4), ratio_level="sequence"),
    "cispo": _rollouts_only("cispo", "token", clip_high=4.0),  # at most 5: ScaleRL, arXiv 2510.13786
    "sapo": _rollouts_only("sapo", "sequence"),
    "dppo": _rollouts_only("dppo", "token", normalize_std=False),
    "sft": Algorithm(Objective(external="nll", gamma=0.0), demonstrations="only"),
    "dft": Algorithm(Objective(external="dft", gamma=0.0), demonstrations="only"),
}


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name; ValueError names the nearest one."""
    _check_name("algorithm", name, tuple(ALGORITHMS))
    return ALGORITHMS[name]
