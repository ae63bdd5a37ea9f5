"""The presets are what the papers say, and an objective refuses what it does not know."""

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from same_bits import CASES

from rlplus import OBJECTIVES, Objective, policy_loss
from rlplus.loss.objective.objective import PresetName
from rlplus.train.algorithm import (
    ALGORITHMS,
    Critic,
    Distill,
    EntropyWeights,
    Gate,
    Interleaved,
    Plain,
    Prefix,
    PrefixSearch,
    ProcessReward,
    Refill,
    Replay,
    SelfDistill,
    Shaping,
)
from rlplus.train.algorithm.options import RECIPES as KINDS

SCRIPT: dict[str, Any] = {"entropy_coef": 1e-3}  # the official scripts'
ABLATIONS: dict[str, dict[str, Any]] = {
    "": {"gamma": 0.5, "external": "mis"},
    "-no-eba": {"external": "mis"},
    "-no-mis": {"gamma": 0.5, "external": "omega"},
    "-proxy": {"external": "proxy"},
    "-omega": {"external": "omega"},
    "-bayes": {"external": "bayes"},
}
PRESETS: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    **{f"rlplus{name}": (fields, "token", True, "group") for name, fields in ABLATIONS.items()},
    **{f"rlplus-official{name}": (SCRIPT | fields, "official", False, "group") for name, fields in ABLATIONS.items()},
    "luffy": (SCRIPT | {"external": "shaped"}, "official", False, "group"),
    "exgrpo": (SCRIPT | {"external": "shaped"}, "official", False, "group"),
    "grpo": ({"internal": "clip"}, "sequence", True, "none"),
    "grpo-official": (SCRIPT | {"internal": "clip"}, "official", False, "none"),
    "grpo-sft": (SCRIPT | {"external": "nll"}, "official", False, "apart"),
    "relift": (SCRIPT | {"external": "nll"}, "official", False, "apart"),
    "hpt": (SCRIPT | {"external": "nll"}, "official", False, "apart"),
    "superrl": ({"internal": "clip", "external": "nll"}, "sequence", True, "apart"),
    "uft": ({"internal": "clip", "external": "nll", "external_coef": 1e-3, "kl_coef": 1e-3}, "token", True, "apart"),
    "prefix-rft": ({"internal": "clip", "external": "proxy", "dual_clip": 3.0}, "constant", False, "group"),
    "bread": ({"internal": "clip", "kl_coef": 1e-3}, "sequence", True, "group"),
    "srft": (SCRIPT | {"internal": "reinforce", "external": "shaped"}, "official", True, "group"),
    "chord": ({"internal": "clip", "external": "dft", "external_coef": 1 / 9, "gamma": 1.0}, "token", True, "apart"),
    "dr-grpo": ({"internal": "clip"}, "constant", False, "none"),
    "pope": ({"internal": "clip"}, "sequence", False, "none"),
    "dapo": ({"internal": "clip", "clip_high": 0.28, "dual_clip": 10.0}, "token", True, "none"),
    "simplerl": ({"internal": "clip", "kl_coef": 1e-4, "entropy_coef": 1e-3}, "token", True, "none"),
    "ppo": ({"internal": "clip"}, "token", True, "none"),
    "prime": ({"internal": "clip"}, "sequence", True, "none"),
    "gspo": ({"internal": "clip", "clip_low": 3e-4, "clip_high": 4e-4}, "sequence", True, "none"),
    "cispo": ({"internal": "cispo", "clip_high": 4.0}, "token", True, "none"),
    "sapo": ({"internal": "sapo"}, "sequence", True, "none"),
    "dppo": ({"internal": "dppo"}, "token", False, "none"),
    **dict.fromkeys(("gkd", "opd", "opsd", "sdpo"), ({}, "token", True, "none")),
    "sdft": ({}, "sequence", True, "none"),
    "sft": ({"external": "nll"}, "token", True, "only"),
    "dft": ({"external": "dft"}, "token", True, "only"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_what_the_papers_say(name: str) -> None:
    plain = {"internal": "ratio", "external": "none", "gamma": 0.0, "kappa": 0.1, "clip_low": 0.2, "clip_high": 0.2}
    plain |= {"dual_clip": None, "kl_coef": 0.0, "entropy_coef": 0.0, "mismatch_cap": None}
    plain |= {"external_coef": 1.0, "ratio_cap": 20.0, "tau_pos": 1.0, "tau_neg": 1.05, "kl_estimator": "k3"}
    plain |= {"mixture_share": 0.5}
    plain |= {"mismatch_low": 0.0, "mismatch_mode": "truncate"}
    fields, reduction, normalize_std, demonstrations = PRESETS[name]
    algorithm = ALGORITHMS[name]
    assert dataclasses.asdict(algorithm.objective) == plain | fields
    assert Objective.preset(name) == algorithm.objective
    assert algorithm.reduction == reduction
    prime = Refill(low=0.2, high=0.8, max_draws=4, fill=True)
    assert algorithm.refill == {"dapo": Refill(low=0.0, high=1.0, max_draws=10), "prime": prime}.get(name)
    assert algorithm.shaping == (Shaping(wrong=-1.0, overlong=0.2) if name == "dapo" else None)
    assert algorithm.skip_grad_norm == {"hpt": 80.0, "exgrpo": 500.0}.get(name, 0.0)
    assert (algorithm.top_entropy, algorithm.external_top_entropy) == (1.0, 0.2 if name == "prefix-rft" else 1.0)
    assert algorithm.ratio_level == ("sequence" if name == "gspo" else "token")
    assert algorithm.demonstrations == demonstrations
    if demonstrations != "only":  # there is a group
        assert algorithm.normalize_std is normalize_std


RECIPES = {
    "relift": Interleaved(batch=128),
    "hpt": Gate(solved=0, keep=False),
    "superrl": Gate(solved=0, keep=False),
    "uft": Prefix(schedule="binomial", low=0.05, high=0.95, steps=300, segments=5, members=None, trained=True),
    "prefix-rft": Prefix(schedule="window", low=0.05, high=0.95, steps=500, members=1),
    "bread": PrefixSearch(parts=10, above=0.0, below=1.0),
    "srft": EntropyWeights(
        signs=True, level="sequence", positive=0.1, positive_exponent=1.0, supervised=0.5, supervised_exponent=-1.0
    ),
    "exgrpo": Replay(share=0.5, start=0.35),
    "ppo": Critic(),
    "prime": ProcessReward(),
    "gkd": Distill(loss="jsd", beta=0.5),
    "opd": Distill(loss="sampled"),
    "opsd": SelfDistill(teacher="initial", loss="jsd", beta=0.5),
    "sdft": SelfDistill(teacher="average", teacher_update_rate=0.01, loss="forward_kl", shows="demonstration"),
    "sdpo": SelfDistill(
        teacher="average", teacher_update_rate=0.05, loss="jsd", beta=0.5, shows="response", shown_reward=1.0
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_presets_have_the_recipes_of_the_papers(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert algorithm.recipe == RECIPES.get(name, Plain())
    assert algorithm.external_reduction == ("token" if name in ("grpo-sft", "relift", "hpt") else None)
    in_place = name == "srft" or name not in RECIPES
    assert algorithm.demonstrates_in_place == (algorithm.demonstrates and in_place)


def test_chord_weighs_the_likelihood_of_demonstrations_by_p_times_one_less_p() -> None:
    """The phi function of arXiv 2508.11408, whatever the advantage."""
    p = torch.linspace(0.01, 0.99, 25, dtype=torch.float64)
    logprob = p.log().requires_grad_()
    constants = {"old_logprob": None, "advantage": torch.linspace(-2, 2, 25).double()}
    external = torch.ones(25, dtype=torch.bool)
    weight = torch.full((25,), 1 / 25, dtype=torch.float64)
    objective = ALGORITHMS["chord"].objective
    loss, _ = policy_loss(logprob, token_weight=weight, external=external, objective=objective, **constants)
    torch.testing.assert_close(loss, -(p * (1 - p) * p.log()).mean() / 9, rtol=1e-12, atol=0)
    loss.backward()
    torch.testing.assert_close(logprob.grad, -p * (1 - p) / 25 / 9, rtol=1e-12, atol=0)


def test_ppo_is_open_reasoner_zeros() -> None:
    """The options of its published script (orz_7b_ppo.py)."""
    assert ALGORITHMS["ppo"].recipe.model_dump() == {
        "name": "critic",
        "gamma": 1.0, "gae_lambda": 1.0, "whiten": True, "stopped_only": True, "critic_updates": 12, "value_clip": 0.2,
        "lr": 5e-6, "warmup_steps": 50,
    }  # fmt: skip


def test_prime_is_its_authors() -> None:
    """The options of their published script (run_prime_main.sh)."""
    assert ALGORITHMS["prime"].recipe.model_dump() == {
        "name": "process-reward",
        "update": "after", "beta": 0.05, "lr": 1e-6, "warmup_steps": 0, "grad_clip": 10.0, "weight_decay": 0.0,
    }  # fmt: skip


def test_no_preset_is_untested_and_the_default_is_rlplus() -> None:
    assert set(ALGORITHMS) == set(PRESETS)
    assert Objective() == Objective.preset("rlplus")


def test_editors_know_the_presets() -> None:
    assert get_args(PresetName) == tuple(OBJECTIVES)


def test_objective_is_frozen_and_replaceable() -> None:
    objective = Objective.preset("grpo")
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.gamma = 1.0  # type: ignore[misc]
    assert dataclasses.replace(objective, clip_high=0.28, dual_clip=10.0) == Objective.preset("dapo")
    with pytest.raises(ValueError, match="want clip_low a finite number >= 0; got -1"):
        dataclasses.replace(objective, clip_low=-1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective.preset("rlpuls"), "got 'rlpuls'.*nearest: rlplus"),
        (lambda: Objective.preset("zzzz"), "want objective one of rlplus, .*; got 'zzzz'$"),
        (lambda: Objective(internal="ratios"), "internal surrogate .*got 'ratios'; nearest: ratio"),
        (lambda: Objective(external="shape"), "external surrogate .*got 'shape'; nearest: shaped"),
        (lambda: Objective(gamma=-0.5), "want gamma a finite number >= 0; got -0.5"),
        (lambda: Objective(mixture_share=0.0), "want mixture_share a finite number > 0 and < 1; got 0.0"),
        (lambda: Objective(mixture_share=1.0), "want mixture_share a finite number > 0 and < 1; got 1.0"),
        (lambda: Objective(kappa=0.0), "want kappa a finite number > 0; got 0.0"),
        (lambda: Objective(dual_clip=1.0), "want dual_clip a finite number > 1; got 1.0"),
        (lambda: Objective(external_coef=0.0), "want external_coef a finite number > 0; got 0.0"),
        (lambda: Objective(ratio_cap=0.5), "want ratio_cap a finite number >= 1; got 0.5"),
        (lambda: Objective(tau_pos=0.0), "want tau_pos a finite number > 0; got 0.0"),
        (lambda: Objective(tau_neg=-1.0), "want tau_neg a finite number > 0; got -1.0"),
        (lambda: Objective(kl_estimator="k1"), "got k1, which as a loss has an expected gradient of 0"),
        (lambda: Objective(kl_estimator="k3_unbiased"), "want kl_estimator one of k2, .*nearest: k3-unbiased"),
        (lambda: Objective(mismatch_mode="masks"), "want mismatch_mode one of truncate, mask; got 'masks'"),
        (lambda: Objective(mismatch_cap=2.0, mismatch_low=2.5), "want mismatch_low < mismatch_cap; got 2.5 and 2"),
        (lambda: Objective(mismatch_cap=0.0), "want mismatch_cap a finite number > 0"),
        (lambda: Objective(kl_coef=math.nan), "want kl_coef a finite number >= 0; got nan"),
        (lambda: Objective(entropy_coef="1e-3"), "want entropy_coef a finite number; got '1e-3'"),
        (lambda: Objective(clip_high=None), "want clip_high a finite number >= 0; got None"),
    ],
)
def test_objective_refuses_what_it_does_not_know(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_bits_of_every_recipe_are_compared() -> None:
    """A case of same_bits.py begins with its recipe, the preset's."""
    recipes = {name: ALGORITHMS[case["algorithm"]["preset"]].recipe.name for name, case in CASES.items()}
    assert {recipe for name, recipe in recipes.items() if name.startswith(f"{recipe} ")} == {*KINDS}
    assert all(name.startswith((f"{recipe} ", "options ")) for name, recipe in recipes.items())
