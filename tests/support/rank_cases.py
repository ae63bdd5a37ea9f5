"""Updates of a tiny model on one or several ranks, for `test_ranks.py`: many cases in one process group.

    torchrun --nproc_per_node 2 tests/support/rank_cases.py FOLDER NAME CASE ...

Rank 0 writes FOLDER/NAME.pt: for each case the gradients of one update and what else there is to compare.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from trainer_runs import metrics, run_config
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from rlplus.common import agree
from rlplus.common.agree import initialize_distributed
from rlplus.loss.backends.selection import Choice
from rlplus.loss.operations import library
from rlplus.loss.operations.library import _scale as scale
from rlplus.train.config import Config, ModelConfig
from rlplus.train.data import MicroBatch, Sample
from rlplus.train.learner import ValueModel, by_sample, make_micro_batches
from rlplus.train.learner import learner as learner_module
from rlplus.train.learner import policy as policy_module
from rlplus.train.learner.adapters import add_adapters
from rlplus.train.learner.policy import Policy
from rlplus.train.learner.pretrained import load_model, prepare_model
from rlplus.train.recipe import Batch, make_recipe
from rlplus.train.trainer import train
from rlplus.train.trainer.metrics import Tally, tally_outputs, tally_update

ALWAYS_SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
LORA = {"rank": 4, "alpha": 8.0}


def case(
    owners: str = "stripes",
    tied: bool = True,
    preset: str = "rlplus",
    flash: bool = False,
    known: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """A case. known: whether the demonstrations' logprobs under their author are given."""
    data = {"behavior_logprob": "b"} if known else {}
    model = {name: changes.pop(name) for name in ("gradient_checkpointing", "lora") if name in changes}
    chosen: dict[str, Any] = {"owners": owners, "tied": tied, "preset": preset, "flash": flash}
    return chosen | {"data": data, "model": model, "train": changes}


def zero3(**changes: Any) -> dict[str, Any]:
    return case(zero_stage=3, deepspeed=ALWAYS_SHARDED, **changes)


CASES: dict[str, dict[str, Any]] = {
    "tied": case(),
    "untied": case(tied=False),
    "kl": case(preset="grpo"),
    "lora": case(lora=LORA),
    "lora kl": case(lora=LORA, preset="grpo"),
    "apart": case(preset="grpo-sft"),
    "bonus": case(preset="grpo-official"),
    "single": case("single"),
    "known": case(known=True),
    "tied, one rank has almost all": case("one"),
    "known, sequences": case(known=True, sequence_parallel=2),
    "known, one rank has almost all": case("one", known=True),
    "tied, ZeRO-2, one rank has nothing": case("nothing", zero_stage=2),
    "tied, ZeRO-3": zero3(),
    "tied, ZeRO-3, one rank has nothing": zero3(owners="nothing"),
    "single, ZeRO-2": case("single", zero_stage=2),
    "single, ZeRO-3": zero3(owners="single"),
    "untied, ZeRO-3": zero3(tied=False, gradient_checkpointing=True),
    "kl, ZeRO-3": zero3(preset="grpo"),
    "apart, ZeRO-2, one rank has almost all": case("one", preset="grpo-sft", zero_stage=2),
    "bonus, ZeRO-3": zero3(preset="grpo-official"),
    "lora, ZeRO-3": zero3(lora=LORA),
    "tied, offload, ZeRO-2": case(zero_stage=2, offload_optimizer="cpu"),
    "tied, offload, ZeRO-3": zero3(offload_optimizer="cpu", offload_params="cpu"),
    "tied, sequences": case(sequence_parallel=2),
    "untied, sequences, ZeRO-3": zero3(tied=False, sequence_parallel=2, owners="one", gradient_checkpointing=True),
    "kl, sequences, ZeRO-2": case(preset="grpo", sequence_parallel=2, zero_stage=2),
    "tied, as flash attention does it": case(flash=True),
    "tied, sequences, as flash attention does it": zero3(flash=True, sequence_parallel=2),
    "untied, shard_head, one rank has nothing": zero3(tied=False, shard_head=True, owners="nothing"),
    "untied, shard_head, sequences": zero3(tied=False, shard_head=True, sequence_parallel=2, owners="one"),
    "untied, shard_head, offload": zero3(tied=False, shard_head=True, offload_optimizer="cpu", offload_params="cpu"),
    "lora kl, sequences": case(lora=LORA, preset="grpo", sequence_parallel=2),
}
LEARNERS = {
    f"{preset}{name}": kind(preset=preset, prompts_per_step=12, **changes)
    for preset in ("ppo", "prime")
    for name, kind, changes in (("", case, {}), (", ZeRO-2", case, {"zero_stage": 2}), (", ZeRO-3", zero3, {}))
}
LEARNER_OPTIONS = {"ppo": {"critic_updates": 5, "lr": 1e-3, "warmup_steps": 0}, "prime": {"lr": 1e-3}}
REFERENCES = [name for name in CASES if "," not in name]
QUICK = (
    "tied, one rank has almost all",
    "tied, ZeRO-3, one rank has nothing",
    "untied, sequences, ZeRO-3",
    "lora, ZeRO-3",
    "untied, shard_head, one rank has nothing",
    "known, sequences",
)


def make_model(folder: Path, tied: bool) -> Path:
    """Write the model, once, before the test starts any rank."""
    path = folder / ("tied" if tied else "untied")
    if not path.exists():
        torch.manual_seed(3)
        config = Qwen2Config(
            vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, initializer_range=0.3, tie_word_embeddings=tied, max_position_embeddings=128,
        )  # fmt: skip
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(path)
    return path


def all_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    samples = []
    for i in range(24):
        prompt, response = (int(torch.randint(1, high, (), generator=generator)) for high in (9, 40))
        ids = torch.randint(0, 256, (prompt + response,), generator=generator).tolist()
        advantage = float(torch.randn((), generator=generator)) if i % 5 else 0.0
        samples.append(Sample(ids[:prompt], ids[prompt:], i, i % 4 == 3, False, None, advantage=advantage))
        if samples[-1].demonstration:
            samples[-1].behavior_logprob = [-0.1 * (j % 7) for j in range(response)]
    return samples


def own_samples(owners: str, rank: int, world: int) -> list[Sample]:
    samples = all_samples()
    if owners == "single":  # the other rank has nothing to do but dummies
        samples = samples[1:2] if rank == 0 else []
    if owners == "single" or world == 1:
        return samples
    few = {"one": 2, "nothing": 0}.get(owners)
    if few is None:
        return samples[rank::world]
    return samples[:few] if rank else samples[few:]


def config_of(folder: Path, name: str) -> Config:
    chosen = (CASES | LEARNERS)[name]
    return Config.model_validate(
        {
            "output_dir": str(folder / "out"),
            "model": {"path": str(make_model(folder, chosen["tied"])), "dtype": "float32"} | chosen["model"],
            "data": {"path": "-", "demonstration": "d", "max_prompt_length": 8} | chosen["data"],
            "reward": {"kind": "exact_match"},
            "rollout": {"max_response_length": 40} | ({"group_size": 2} if name in LEARNERS else {}),
            "algorithm": {
                "preset": chosen["preset"],
                "objective": {"kl_coef": 0.5} if chosen["preset"] == "grpo" else {},
                "recipe": LEARNER_OPTIONS.get(chosen["preset"], {}),
            },
            "train": {"steps": 1, "tokens_per_micro_batch": 64, "lr": 1e-3} | chosen["train"],
        }
    )


def add_trained_adapters(lm: Any, *args: Any) -> None:
    """Adapters as after some training: B starts at 0, where A's have no gradient."""
    add_adapters(lm, *args)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def varlen_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, position_ids: Any, cu_seq_lens_q: Any = None, **_: Any
) -> Any:
    """The result of flash-attn's varlen kernel, from the arguments that transformers would pass."""
    assert mask is None
    assert len(query) == 1
    if cu_seq_lens_q is None:
        (cu_seq_lens_q, _), _ = prepare_fa_kwargs_from_position_ids(position_ids)
    places = torch.arange(query.shape[2])
    sequence = torch.bucketize(places, cu_seq_lens_q[1:].long(), right=True)
    seen = (sequence[:, None] == sequence) & (places[:, None] >= places)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
    return out.transpose(1, 2), None


def load_for_flash(config: ModelConfig, *args: Any) -> Any:
    lm = load_model(config.model_copy(update={"attention": "sdpa"}), *args)
    lm.config._attn_implementation = "flash_attention_2"
    return lm


def make_policy(folder: Path, name: str) -> tuple[Config, Policy]:
    config = config_of(folder, name)
    if CASES[name]["flash"]:  # set afterwards: it is refused in float32
        model = config.model.model_copy(update={"attention": "flash_attention_2"})
        config = config.model_copy(update={"model": model})
        if not hasattr(AttentionInterface()["flash_attention_2"], "exchanges_heads"):
            AttentionInterface.register("flash_attention_2", varlen_attention)
    path, model_config = prepare_model(config.model, folder, 0)
    with mock.patch.multiple(
        learner_module,
        add_adapters=add_trained_adapters,
        load_model=load_for_flash if CASES[name]["flash"] else load_model,
    ):
        return config, Policy(config, path, model_config, reference=bool(config.algorithm.resolve().objective.kl_coef))


def run_case(folder: Path, name: str) -> dict[str, Any]:
    config, policy = make_policy(folder, name)
    algorithm = config.algorithm.resolve()
    own = own_samples(CASES[name]["owners"], dist.get_rank(), dist.get_world_size())
    batches = make_micro_batches(own, algorithm, config, 256, policy.device)
    for batch in batches:
        batch.old_logprob = policy.logprob(batch)
        if algorithm.objective.kl_coef:
            batch.ref_logprob = policy.logprob(batch, reference=True) - 0.3  # equal ones have no gradient
    gradients: dict[str, torch.Tensor] = {}
    step = policy.engine.step

    def keep_gradients() -> None:
        for parameter_name, parameter in policy.engine.module.named_parameters():
            if parameter.requires_grad:
                gradients[parameter_name] = safe_get_full_grad(parameter).clone()
        step()

    policy.engine.step = keep_gradients
    before = {n: w.clone() for n, w in policy.weights()}
    factors: list[float] = []
    with mock.patch.object(library, "_scale", lambda g, by, *rest: factors.append(float(by)) or scale(g, by, *rest)):
        outputs = policy.backward(batches, policy.loss_of(algorithm.objective))
    lr, applied = policy.lr, policy.step()
    tally = Tally()
    tally_outputs(tally, outputs)
    tally_update(tally, policy.grad_norm, lr, applied)
    ranks: list[Any] = [None] * dist.get_world_size()
    mine = {
        "tokens": sum(batch.tokens for batch in batches),
        "micro_batches": len(batches),
        "loss": float(sum(out.loss.double() for out in outputs)),
        "logged": float(sum(out.stats[name].double() for out in outputs for name in out.stats if "loss_" in name)),
        "factors": set(factors),
        "squared slopes": policy.squared_slopes(batches, outputs, algorithm.objective),
        "own_pass_is_old": all(torch.equal(o.logprob, b.old_logprob) for o, b in zip(outputs, batches, strict=True)),
        "response_tokens": sum(int((batch.token_weight != 0).sum()) for batch in batches),
    }
    dist.all_gather_object(ranks, mine)
    after = {n: w.clone() for n, w in policy.weights()}
    finite = policy.nonfinite() == ""
    name, parameter = [(n, p) for n, p in policy.engine.module.lm.named_parameters() if "up_proj" in n][-1]
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.view(-1)[-1] = torch.inf  # the last rank's shard has it
    return {
        "nonfinite": (finite, policy.nonfinite() == f"parameter {name}"),
        "gradients": gradients,
        "norm": policy.grad_norm,
        "applied": applied,
        "row": {name: value for name, value in tally.reduce().items() if name.startswith("actor/")},
        "before": before,
        "after": after,
        "ranks": ranks,
    }


def run_learner(folder: Path, name: str) -> dict[str, Any]:
    """The results of a step on given samples, two per prompt: advantages, and the learner's outputs afterwards."""
    config, rank, world = config_of(folder, name), dist.get_rank(), dist.get_world_size()
    recipe = make_recipe(config)
    recipe.build(*prepare_model(config.model, folder, 0), pad_id=256)
    samples = [
        replace(sample, group=i // 2 // world, external=False, advantage=0.0, reward=float(i % 3 == 0))
        for i, sample in enumerate(all_samples())
        if i // 2 % world == rank
    ]
    (learner,) = recipe.learners.values()
    ask = learner.value if isinstance(learner, ValueModel) else learner.score
    batch, applied = recipe.collect(lambda: Batch([], samples, 0.0)), list[bool]()
    recipe.credit(batch)
    recipe.fit(batch, applied.append)
    after = by_sample(samples, ask, config, 256, learner.device)
    own = [(s.returns, s.advantage, scores.tolist()) for s, scores in zip(samples, after, strict=True)]
    tally = Tally()
    for metric, (total, count) in recipe.metrics().items():
        tally.mean(metric, total, count)
    row = {metric: value for metric, value in tally.reduce().items() if not metric.startswith("time/")}
    ranks = agree.gathered(own)
    ordered = [ranks[i // 2 % world][i // 2 // world * 2 + i % 2] for i in range(24)]
    return {"samples": ordered, "row": row, "applied": applied}


def agreed_backends() -> list[list[tuple[str, str]]]:
    """The ranks' backends if all choose triton, if only the first one does, and if none does."""
    agreed, rank = [], dist.get_rank()
    for ranks_with_triton in (dist.get_world_size(), 1, 0):
        own = Choice("triton" if rank < ranks_with_triton else "torch", f"reason {rank}")
        with mock.patch.object(policy_module, "choose", return_value=own):
            agreed.append(tuple(policy_module.agreed_backend("auto", torch.device("cuda", 0), torch.bfloat16)))
    return agree.gathered(agreed)


def skipped_updates(folder: Path) -> list[list[bool]]:
    """Whether an update is applied, on each rank, with a limit above the norm of its gradient and with one below."""
    config, policy = make_policy(folder, "tied, ZeRO-3, one rank has nothing")
    algorithm, applied, limit = config.algorithm.resolve(), list[bool](), 0.0
    samples = own_samples("nothing", dist.get_rank(), dist.get_world_size())
    for factor in (0.0, 2.0, 0.5):
        batches = make_micro_batches(samples, algorithm, config, 256, policy.device)
        policy.backward(batches, policy.loss_of(algorithm.objective))
        applied.append(policy.step(factor * limit))
        limit = policy.grad_norm or 0.0
    return agree.gathered(applied)


def statistics_by_sample(folder: Path, name: str) -> list[Tensor]:
    """Logprobs and entropies of samples that all ranks have."""
    config, policy = make_policy(folder, name)

    def statistics(batch: MicroBatch) -> Tensor:
        return torch.stack(policy.statistics(batch), 1)

    return by_sample(all_samples()[:7], statistics, config, 256, policy.device)


def refilled_run(folder: Path, name: str) -> list[dict[str, float]]:
    """The metrics of a few steps of DAPO, in which each rank leaves out groups of its own."""
    config = run_config(folder, name, algorithm={"preset": "dapo"}, train={"steps": 4, "prompts_per_update": 2})
    agree.barrier()  # the ranks write the same file of prompts

    def draw_rewards(samples: list[Sample], *_: Any) -> None:
        for sample in samples:
            sample.reward = float(sum(sample.response) % 7 == 0)

    with mock.patch("rlplus.train.trainer.loop.score", draw_rewards):
        return metrics(train(config))


def main() -> None:
    folder, output, *names = sys.argv[1:]
    initialize_distributed()
    chosen = names or CASES
    results: dict[str, Any] = {n: (run_learner if n in LEARNERS else run_case)(Path(folder), n) for n in chosen}
    results["agreed backends"] = agreed_backends()
    results["skipped updates"] = skipped_updates(Path(folder))
    results["by sample"] = statistics_by_sample(Path(folder), "tied, sequences")
    results["refilled run"] = refilled_run(Path(folder), f"{output} refilled")
    if dist.get_rank() == 0:
        torch.save(results, Path(folder) / f"{output}.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
