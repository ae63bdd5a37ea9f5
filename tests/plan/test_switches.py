"""The switches that the search for remedies turns."""

import pytest
from plan_cases import paper

from rlplus.tools.plan import make_cluster, read_model
from rlplus.tools.plan.search import all_switches, with_changes


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.lora={rank: 16, quantization: nf4}",),
        ("model.lora={rank: 16}", "rollout.lora=adapters"),
        ("rollout.tensor_parallel_size=2", "rollout.vllm={max_num_seqs: 8}", "rollout.push_timeout_s=30.0"),
        ("train.zero_stage=3", "train.shard_head=true"),
        ("train.zero_stage=3", "train.backend=reference"),
    ],
)
def test_every_switch_alone_is_a_configuration(overrides):
    """Else the search with all of them would find nothing."""
    config, cluster = paper(*overrides), make_cluster(4, "a100-80g")
    switches = list(all_switches(config, read_model(config)[0], cluster))
    assert len(switches) > 4
    for changes in (changes for settings in switches for changes in settings):
        assert with_changes(config, changes) is not None, changes
