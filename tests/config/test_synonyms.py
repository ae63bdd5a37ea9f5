"""Names of other trainers lead to keys that exist."""

from collections.abc import Mapping
from dataclasses import fields

import pytest
from pydantic import BaseModel

from rlplus import Objective
from rlplus.config import Config
from rlplus.config.loading import _section
from rlplus.config.synonyms import COMMON, OPENRLHF, TRL, VERL, synonym

OBJECTIVE = {f"algorithm.objective.{field.name}" for field in fields(Objective)}


@pytest.mark.parametrize("names", [TRL, VERL, OPENRLHF, COMMON], ids=["TRL", "verl", "OpenRLHF", "common"])
def test_every_name_leads_to_a_key(names: Mapping[str, str]) -> None:
    for key in names.values():
        section: type[BaseModel] | None = Config
        for part in [] if key in OBJECTIVE else key.split("."):
            assert section is not None, key
            assert part in section.model_fields, key
            section = _section(section.model_fields[part].annotation)


def test_paths_count_from_their_end_and_flags_lose_their_dashes() -> None:
    assert synonym("actor_rollout_ref.rollout.n") == "verl's rollout.n is rollout.group_size here"
    assert synonym("rollout.n") == "verl's rollout.n is rollout.group_size here"
    assert synonym("x.rollouts.n") is None
    assert synonym("n-samples-per-prompt") == "OpenRLHF's n_samples_per_prompt is rollout.group_size here"
    assert synonym("kl_coef") == "here it is algorithm.objective.kl_coef"
    assert synonym("rollout.push_folder") == "here it is rollout.transfer", "0.3.0 had it"
    assert synonym("anything") is None


def test_sizes_say_what_they_count() -> None:
    """8 sequences a device are no 8 tokens, and a batch of 1024 completions no 1024 prompts."""
    assert synonym("per_device_train_batch_size") == (
        "TRL's per_device_train_batch_size is train.tokens_per_micro_batch here, in tokens"
    )
    assert synonym("data.train_batch_size") == "verl's data.train_batch_size is train.prompts_per_step here, in prompts"
    assert synonym("mini_batch_size") == "here it is train.prompts_per_update, in prompts"


def test_a_penalty_in_the_reward_is_not_one_in_the_loss() -> None:
    assert synonym("algorithm.kl_ctrl.kl_coef") == ("verl's algorithm.kl_ctrl.kl_coef is algorithm.reward_kl_coef here")


def test_a_name_without_a_counterpart_has_a_reason() -> None:
    reason = "has no counterpart here: the loss there is of the whole vocabulary, "
    reason += "while rollout.top_k, top_p and min_p train the policy that sampled"
    assert synonym("top_p") == f"TRL's top_p {reason}"
    assert synonym("actor_rollout_ref.rollout.top_p") == f"verl's rollout.top_p {reason}"
    assert synonym("--algo.kl.init_coef") == "OpenRLHF's algo.kl.init_coef is algorithm.reward_kl_coef here"
    assert synonym("--train.batch_size") == "OpenRLHF's train.batch_size is train.prompts_per_update here, in prompts"
    assert synonym("train.batch_size") == "here it is train.prompts_per_step, in prompts"
    assert str(synonym("--vllm.num_engines")).startswith("OpenRLHF's vllm.num_engines has no counterpart here: ")
