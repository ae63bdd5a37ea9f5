"""The policy: a learner whose head is the fused loss, with its logprobs, reference and weights for export."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from rlplus.common import agree
from rlplus.loss import Objective, PolicyLoss, TokenConstants, linear_logprob, linear_policy_loss, token_loss
from rlplus.loss.backends.selection import Choice, choose
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch
from rlplus.train.learner.adapters import adapter_weights, merged_weights, without_adapters
from rlplus.train.learner.dropout import dropout_of
from rlplus.train.learner.gradients import with_head_gradient
from rlplus.train.learner.learner import Learner, Optimization, this_device
from rlplus.train.learner.packed_model import PackedModel, check_both_ways, probe_batch
from rlplus.train.learner.pretrained import load_model, write_model
from rlplus.train.learner.widened import widened
from rlplus.train.rollout.vllm_options import Adapters


class Policy(Learner):
    """A language model that is trained with a policy loss, and provides weights for the rollout engine and for export.

    reference: whether `logprob` is also needed under the initial model. temperature: None for the one of sampling, with
    the softmax over the kept tokens where a batch has them.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        model_config: PretrainedConfig,
        own: Optimization | None = None,
        *,
        reference: bool = False,
        temperature: float | None = None,
    ) -> None:
        head = (config.train.backend, this_device(), getattr(torch, config.model.dtype))
        choose(*head)  # a GPU's self-check needs memory, which the model is about to take
        self.backend: str = config.train.backend
        self.samples = temperature is None  # its logprobs are of the distribution that is sampled from
        self.temperature = config.rollout.temperature if temperature is None else temperature
        super().__init__(config, model_path, model_config, own)
        self.backend, self.why_backend = agreed_backend(*head)
        self.engine.eval()
        parallel = config.train.sequence_parallel
        model = self.engine.module
        check_both_ways(model, self.engine, self.device, model_config.vocab_size, parallel, config.model.attention)
        self.engine.train()
        self.reference: PackedModel | None = None
        if reference and config.model.lora is None:  # frozen; each rank holds a whole copy
            lm = load_model(config.model, model_path, model_config)
            self.reference = PackedModel(lm, self.group).to(self.device).eval().requires_grad_(False)

    def nonfinite(self) -> str:
        """The place of NaN or infinity: the first such parameter, else a batch's logprobs; empty if all is finite.

        Collective. A pass over this rank's weights and one forward pass of two short sequences.
        """
        if what := super().nonfinite():
            return what
        batch = probe_batch(self.model_config.vocab_size, self.config.train.sequence_parallel).to(self.device)
        bad = agree.largest(not self.logprob(batch).isfinite().all())
        return "the logprobs of a test batch, though in no parameter" if bad else ""

    @torch.no_grad()
    def logprob(self, batch: MicroBatch, *, reference: bool = False) -> Tensor:
        """log p (N,) of the batch's targets at the temperature, under the policy or the frozen reference."""
        if not reference:
            return self.statistics(batch)[0]
        if self.reference is not None:
            logprob: Tensor = self.reference(batch, partial(linear_logprob, **self.head_options(batch)))[0]
            return logprob
        assert self.config.model.lora, "want a policy with a reference"
        with without_adapters(self.engine.module):
            return self.statistics(replace(batch, experts=None))[0]  # a frozen copy replays nothing either

    @torch.no_grad()
    def statistics(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """log p (N,) of the batch's targets and the entropy (N,), at the temperature."""
        op = linear_logprob if self._sharded is None else self._sharded.logprob
        logprob, entropy = self.engine(batch, partial(op, **self.head_options(batch)))
        return logprob, entropy

    @torch.no_grad()
    def rounding(self, batch: MicroBatch) -> Tensor:
        """(N,) by how much log p of the targets changes when the layers compute in a wider dtype, see `widened`."""
        logprob = self.logprob(batch)
        op: Any = linear_logprob if self._sharded is None else self._sharded.logprob
        options = self.head_options(batch)

        def head(hidden: Tensor, *weight: Any, **others: Any) -> tuple[Tensor, Tensor]:
            both: tuple[Tensor, Tensor] = op(hidden.to(self.engine.module.lm.dtype), *weight, **options, **others)
            return both

        with widened(self.engine.module.lm):
            wide, _ = self.engine(batch, head)
        return (logprob - wide).abs()

    def loss_of(self, objective: Objective) -> Callable[[MicroBatch], Callable[..., PolicyLoss]]:
        """The policy loss, for `backward`."""
        return partial(self._loss_op, objective)

    def _loss_op(self, objective: Objective, batch: MicroBatch) -> Callable[..., PolicyLoss]:
        # DeepSpeed averages gradients over ranks, but the weights' denominators are global already. The factor is in
        # the weights: on the loss it would make the backward pass scale the head's gradient, as large as its weight.
        ranks = dist.get_world_size()
        constants = self.constants(batch, objective)
        bonus = constants.entropy_weight
        constants = constants._replace(
            token_weight=constants.token_weight * ranks, entropy_weight=None if bonus is None else bonus * ranks
        )
        options = {"objective": objective} | self.head_options(batch) | self.backward_options()
        if self._sharded is not None:
            return partial(self._sharded.policy_loss, constants=constants, **options)
        op = partial(linear_policy_loss, **constants._asdict(), **options)
        if not self.gradients_in_fp32 or self.backend == "reference":  # which takes no weight_grad
            return op
        return with_head_gradient(self.engine, op)

    def backward_options(self) -> dict[str, Any]:
        """Arguments of a loss that say which backward pass the head has, for the next micro-batch.

        A seed is of the run, the update, the micro-batch in it and the rank.
        """
        train = self.config.train
        if train.backward != "sampled":
            return {"backward": train.backward}
        place = f"{self.engine.global_steps} {self.micro_batch + 1} {dist.get_rank()}"
        options = {"backward": "sampled", "seed": Random(f"{train.seed} {place}").getrandbits(63)}
        return options if train.backward_threshold is None else options | {"threshold": train.backward_threshold}

    def constants(self, batch: MicroBatch, objective: Objective) -> TokenConstants:
        """The constants that the loss of the batch's tokens depends on besides the policy."""
        return TokenConstants(
            batch.advantage,
            batch.token_weight,
            batch.external,
            old_logprob=batch.old_logprob,
            behavior_logprob=batch.behavior_logprob if self.config.knows_behavior else None,
            ref_logprob=batch.ref_logprob,
            engine_logprob=None if objective.mismatch_cap is None else batch.engine_logprob,
            entropy_weight=batch.entropy_weight,
        )

    def squared_slopes(
        self, batches: Sequence[MicroBatch], outputs: Sequence[PolicyLoss], objective: Objective
    ) -> dict[str, float]:
        """Sums of (dloss / dlogprob (1 - p))^2 over this rank's internal and external tokens, for external_coef 1."""
        plain = replace(objective, external_coef=1.0, kl_coef=0.0, entropy_coef=0.0)
        sums = dict.fromkeys(("internal", "external"), 0.0)
        for batch, out in zip(batches, outputs, strict=True):
            slope = token_loss(out.logprob, out.entropy, self.constants(batch, plain), plain).dlogprob
            squares = torch.where(slope != 0, slope * torch.expm1(out.logprob), 0.0).square()
            sums["internal"] += float(squares[~batch.external].sum())
            sums["external"] += float(squares[batch.external].sum())
        return sums

    def head_options(self, batch: MicroBatch) -> dict[str, Any]:
        """Arguments of the operations on the head that say which distribution the batch's targets have."""
        return {
            "target": batch.target,
            "kept": batch.kept if self.samples else None,
            "temperature": self.temperature,
            "max_scratch_mb": self.config.train.max_scratch_mb,
            "backend": self.backend,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every parameter under its Hugging Face name; all ranks call it and exhaust it."""
        return self._gathered(list(merged_weights(self.engine.module.lm)))

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """`weights`, or with model.lora the adapters alone, in the same way."""
        if self.config.model.lora is None:
            return self.weights()
        return self._gathered(list(adapter_weights(self.engine.module.lm)))

    def pushed(self) -> Iterator[tuple[str, Tensor]]:
        """`weights`, or with rollout.lora adapters these alone: what the engine of the run takes."""
        return self.weights() if self.config.rollout.lora == "merged" else self.trained()

    def adapters(self) -> Adapters | None:
        """Those that are pushed; None where weights are."""
        lora = self.config.model.lora
        if lora is None or self.config.rollout.lora == "merged":
            return None
        found = adapter_weights(self.engine.module.lm)
        shapes = {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, (p,), _ in found}
        return Adapters(lora.rank, lora.alpha, shapes)

    def _gathered(self, entries: Sequence["_Entry"]) -> Iterator[tuple[str, Tensor]]:
        if self.config.train.zero_stage < 3:
            yield from ((name, value()) for name, _, value in entries)
            return
        for bucket in _buckets(entries, self.config.rollout.push_bucket_mb * 2**20):
            with deepspeed.zero.GatheredParameters([p for _, parameters, _ in bucket for p in parameters]):
                yield from ((name, value()) for name, _, value in bucket)

    def export(self, folder: str, ends: Sequence[int]) -> None:
        """Write the weights as a Hugging Face folder (safetensors); all ranks call it. ends: of its responses."""
        state = {}
        for name, weight in self.weights():
            if dist.get_rank() == 0:
                state[name] = weight.cpu().clone()
        if dist.get_rank() == 0:
            lm = self.engine.module.lm
            lm.generation_config.eos_token_id = ends[0] if len(ends) == 1 else [*ends]
            with dropout_of(lm, self.model_config):
                write_model(lm, folder, state)
        agree.barrier()


def agreed_backend(name: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend of all ranks: `torch` if a rank cannot use the one that the others would. Collective."""
    choices = agree.gathered(choose(name, device, dtype))
    if len({choice.backend for choice in choices}) == 1:
        return choices[0]
    refusals = (f"rank {rank}: {choice.reason}" for rank, choice in enumerate(choices) if choice.backend == "torch")
    return Choice("torch", "; ".join(refusals))


_Entry = tuple[str, list[Any], Callable[[], Tensor]]  # parameters with the fields that ZeRO-3 adds


def _buckets(entries: Sequence[_Entry], most_bytes: int) -> Iterator[list[_Entry]]:
    """The entries in order, in lists of at most that many bytes of parameters, or of one entry."""
    bucket: list[_Entry] = []
    size = 0
    for entry in entries:
        nbytes = sum(p.ds_numel * p.element_size() for p in entry[1])
        if bucket and size + nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += nbytes
    yield bucket
