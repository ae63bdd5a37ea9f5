"""A head that stays in ZeRO-3's shards: refusals, memory, and a run; `test_ranks.py` has the numbers of an update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import same, torchrun
from plan_cases import QWEN_7B, make_plan, paper
from trainer_runs import metrics, on_ranks, run_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlplus.tools.plan import make_cluster
from rlplus.tools.plan.memory import head_tokens
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.deepspeed_settings import check_sharded_head
from rlplus.train.trainer import train


def model(**changes: Any) -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"vocab_size": len(byte_tokenizer()), "intermediate_size": 64, "max_position_embeddings": 64}
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**(sizes | config | {"tie_word_embeddings": False} | changes)))


def with_bias(lm: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    lm.lm_head.bias = torch.nn.Parameter(torch.zeros(lm.config.vocab_size))
    return lm


@pytest.mark.parametrize(
    ("make", "ranks", "got"),
    [
        (lambda: model(tie_word_embeddings=True), 2, "one that is tied to the input embeddings, which are gathered"),
        (lambda: with_bias(model()), 2, "one with a bias"),
        (model, 5, "258 tokens and 5 ranks"),
    ],
    ids=["tied", "bias", "ranks"],
)
def test_a_head_that_cannot_stay_in_shards_is_refused(
    make: Callable[[], Qwen2ForCausalLM], ranks: int, got: str
) -> None:
    lm = make()
    with pytest.raises(ValueError, match=rf"train\.shard_head: want a head of its own, .*; got {got}"):
        check_sharded_head(lm, lm.config.vocab_size, ranks)
    check_sharded_head(model(), 258, 2)


def test_a_run_and_its_plan_say_so(tmp_path: Path) -> None:
    """The scratch model's head is tied."""
    config = run_config(tmp_path, train={"shard_head": True, "zero_stage": 3})
    for refused in (lambda: train(config), lambda: make_plan(config, make_cluster(2, "a100-80g"))):
        with pytest.raises(ValueError, match="got one that is tied to the input embeddings"):
            refused()
    with pytest.raises(ValueError, match=r"train\.shard_head has the whole vocabulary only; got rollout\.top_k 8"):
        run_config(tmp_path, train={"shard_head": True, "zero_stage": 3}, rollout={"top_k": 8})


def test_the_plan_counts_no_whole_head() -> None:
    """By hand: R ranks, N response tokens of each in a micro-batch, hidden size H, vocabulary V, bf16."""
    R, V, H = 8, QWEN_7B["vocab_size"], QWEN_7B["hidden_size"]
    options, cluster = ("train.zero_stage=3", "train.backend=torch"), make_cluster(R, "a100-80g")
    whole, shards = (
        make_plan(paper(*options, f"train.shard_head={on}"), cluster).memory.parts for on in ("false", "true")
    )
    N, scratch = head_tokens(paper(*options)), 1.25e9
    assert shards["head"]["head"] == pytest.approx(2 * 2 * R * N * H + scratch, rel=0.02)
    assert shards["head"]["gradient of the head's rows"] == shards["backward"]["gradient of the head's rows"]
    assert shards["backward"]["gradient of the head's rows"] == 4 * V * H // R
    assert whole["head"]["head"] == pytest.approx(2 * N * H + 4 * V * H + scratch, rel=0.02)


PEAKS = """
import sys
import torch
import torch.distributed as dist
from rank_cases import own_samples
from plan_cases import everything_known, real_storages
from rlplus.train.config import load_config
from rlplus.train.learner import make_micro_batches
from rlplus.train.learner.policy import Policy
from rlplus.train.learner.pretrained import prepare_model
from rlplus.tools.plan.activations import Meter
from rlplus.common.agree import initialize_distributed

initialize_distributed()
peaks = []
for path in sys.argv[2:]:
    config = load_config(path)
    policy = Policy(config, *prepare_model(config.model, None, 0))
    algorithm = config.algorithm.resolve()
    own = own_samples("stripes", dist.get_rank(), dist.get_world_size())
    (*_, last) = make_micro_batches(own, algorithm, config, 0, policy.device)
    loss_op = policy._loss_op

    def measured(*arguments):
        op = loss_op(*arguments)

        def run(*inputs, **options):
            alive, start = sum(real_storages().values()), meter.live
            meter.peak = start
            out = op(*inputs, **options)
            peaks.append(alive + meter.peak - start)
            return out

        return run

    policy._loss_op = measured
    with Meter(known=everything_known()) as meter:
        policy.backward([last], policy.loss_of(algorithm.objective))
    policy.close()
if dist.get_rank() == 0:
    torch.save(peaks, sys.argv[1])
"""


@pytest.mark.slow
def test_no_rank_ever_has_the_whole_head(tmp_path: Path) -> None:
    """At most in the loss of a micro-batch: two ranks save the weight and half of its gradient, (V, H) fp32."""
    V, H = 4096, 256
    model(vocab_size=V, hidden_size=H).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    paths = []
    for on in (False, True):
        zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1}
        config = run_config(
            tmp_path,
            f"shards {on}",
            model={"scratch": None, "path": str(tmp_path / "model")},
            train={"zero_stage": 3, "shard_head": on, "backend": "torch", "max_scratch_mb": 1}
            | {"tokens_per_micro_batch": 64, "deepspeed": {"zero_optimization": zero}},
            rollout={"max_response_length": 40},
        )
        paths.append(tmp_path / f"{on}.yaml")
        paths[-1].write_text(config.to_yaml())
    script = tmp_path / "peaks.py"
    script.write_text(PEAKS)
    on_ranks(script, tmp_path / "peaks.pt", *paths)
    whole, shards = torch.load(tmp_path / "peaks.pt")
    saved = 1.5 * 4 * V * H  # the weight, and half of its gradient
    assert whole - shards == pytest.approx(saved, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["exact", "sampled"])
def test_a_run_on_two_ranks_goes_on_bit_for_bit(backward: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    options = {"model": {"scratch": None, "path": str(tmp_path / "model")}, "checkpoint": {"every": 1}}
    section = {"steps": 3, "zero_stage": 3, "prompts_per_update": 2, "backward": backward}
    whole, parts, gathered = (
        run_config(tmp_path, name, train=section | {"shard_head": name != "gathered"}, **options)
        for name in ("whole", "parts", "gathered")
    )
    torchrun(whole)
    torchrun(gathered)
    torchrun(parts, "train.steps=2")
    torchrun(parts, "--resume=auto")
    assert same(Path(whole.output_dir), Path(parts.output_dir))
    rows = metrics(Path(whole.output_dir))
    assert metrics(Path(parts.output_dir)) == rows
    assert all(row["mismatch/mean"] < 1e-5 for row in rows)
    first = metrics(Path(gathered.output_dir))[0]
    if backward == "sampled":  # each has random numbers of its own
        assert rows[0]["actor/backward_elements"] == pytest.approx(first["actor/backward_elements"], rel=0.05)
        drawn = {name for name in first if name.startswith("actor/backward") or "grad" in name}
        rows[0], first = ({k: v for k, v in row.items() if k not in drawn} for row in (rows[0], first))
    assert rows[0] == pytest.approx(first, rel=1e-4, abs=1e-6)
