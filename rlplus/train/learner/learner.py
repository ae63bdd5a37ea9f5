"""A model under DeepSpeed: packed forward passes, gradients over micro-batches, AdamW's step, the learning rate."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import ceil, cos, inf, pi
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlplus.common import activity, agree
from rlplus.train.config import Config, TrainConfig
from rlplus.train.data import MicroBatch
from rlplus.train.learner.adapters import add_adapters, check_installed, quantize
from rlplus.train.learner.deepspeed_settings import check_eight_bit, deepspeed_config
from rlplus.train.learner.gradients import in_fp32, take_fp32_gradients, without_bf16_optimizer
from rlplus.train.learner.packed_model import PackedModel
from rlplus.train.learner.pretrained import in_shards, load_model, restore_buffers
from rlplus.train.learner.sequence import SequenceGroup
from rlplus.train.learner.sharded_head import ShardedHead


@dataclass(frozen=True)
class Optimization:
    """The optimizer of a model that a recipe trains beside the policy; the policy has its settings in `train`.

    The learning rate is constant after the warm-up: the policy's schedule would not fit the model's number of updates.
    weight_decay, grad_clip: None = as in `train`.
    """

    lr: float
    warmup_steps: int
    weight_decay: float | None = None
    grad_clip: float | None = None
    warmup_ratio: None = None
    lr_schedule: Literal["constant"] = "constant"
    lr_min_ratio: float = 0.0


class Learner:
    """A trainable model under DeepSpeed, or this rank's shard of it.

    `model_path` is a Hugging Face folder or hub name, `model_config` its configuration with the run's changes.
    own: the optimizer's settings of a model beside the policy.
    """

    def __init__(
        self, config: Config, model_path: str, model_config: PretrainedConfig, own: Optimization | None = None
    ) -> None:
        self.config = config
        self.model_config = model_config
        self._own = own
        self.micro_batch = 0  # its number in the update
        self._skipped_norms: list[float] = []  # the last update's, if it was skipped for its norm
        self.device = this_device()
        train = config.train
        self.group: SequenceGroup | None = None
        if train.sequence_parallel > 1:
            self.group = SequenceGroup(train.sequence_parallel, model_config, config.model.attention)
        with in_shards(deepspeed_config(config, 1)) if train.zero_stage == 3 else nullcontext():
            lm = self.load(model_path)
        if train.zero_stage == 3:
            restore_buffers(lm)
        if config.model.lora is not None:
            if config.model.lora.quantization is not None:
                quantize(lm, self.device)
            add_adapters(lm, config.model.lora, train.seed)
        if config.model.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        if train.compile:
            _compile_layers(lm)
        sharded = train.shard_head and own is None  # the policy's; models beside it gather theirs
        replay = config.rollout.routing_replay and own is None  # they never sampled, and route as they like
        model = PackedModel(
            lm, self.group, gathers_head=not sharded, masks=train.compile or None, replay=replay
        ).train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        count = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        check_eight_bit(train, count, dist.get_world_size())
        self._optimizer = _adamw(train, parameters, own)
        with without_bf16_optimizer():
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=self._optimizer,
                config=deepspeed_config(config, count, None if own is None else own.grad_clip),
            )
        self.gradients_in_fp32 = in_fp32(self.engine)
        if self.gradients_in_fp32:
            take_fp32_gradients(self.engine)
        if what := self.nonfinite():
            raise ValueError(f"the model in {model_path} has NaN or infinity in {what}: want finite weights")

    def load(self, model_path: str) -> PreTrainedModel:
        """Load the model to train; under ZeRO-3 this is called inside `in_shards`."""
        return load_model(self.config.model, model_path, self.model_config)

    def nonfinite(self) -> str:
        """The first parameter with NaN or infinity; empty if all are finite. Collective; a pass over the weights."""
        name = _first_nonfinite(self.engine.module.lm, self.device)
        return f"parameter {name}" if name else ""

    @cached_property
    def _sharded(self) -> ShardedHead | None:
        return None if self.engine.module.gathers_head else ShardedHead(self.engine.module.lm)

    def backward(
        self,
        batches: Sequence[MicroBatch],
        op: Callable[[MicroBatch], Callable[..., Any]],
        before_each: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Forward and backward passes of one update; every rank passes the same number of micro-batches.

        op: the head's computation for a micro-batch; it returns a named tuple with a `loss`. `step` uses the gradient
        of the sum of these losses; micro-batches that are `forward_only` come first and add nothing to it. DeepSpeed
        averages gradients over ranks, so the losses have their number as a factor, which the outputs have not.
        before_each: called before each micro-batch; may raise.
        """
        outputs = []
        activity.micro_batches.begin(len(batches))
        for i, batch in enumerate(batches):
            self.micro_batch = i
            if before_each is not None:
                before_each()
            self.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            with _deterministic(self.config.train.deterministic):
                with torch.set_grad_enabled(not batch.forward_only):
                    out = self.engine(batch, op(batch))
                if not batch.forward_only:
                    self.engine.backward(out.loss)
            outputs.append(_without_ranks(out))
            activity.micro_batches.add()
        if self.engine.module.replay is not None:
            self.engine.module.replay.use(None)
        if self._sharded is not None:
            self._sharded.give_gradient()
        if self.device.type == "cuda":  # else the optimizer, which reads the norm, would be charged for it
            torch.cuda.synchronize()
        return outputs

    def step(self, skip_above: float = 0.0) -> bool:
        """Take the optimizer's step on the accumulated gradient; False if it was skipped, with the weights unchanged.

        A step is skipped if its gradient is not finite or, unless `skip_above` is 0, has a larger global norm than
        that; `grad_norm` is finite in the second case only.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
        limit = _norm_limit(self.engine.optimizer, skip_above) if skip_above else nullcontext(list[float]())
        with limit as self._skipped_norms:
            self.engine.step()
        applied: bool = self.engine.was_step_applied()
        return applied

    def close(self) -> None:
        """Release the model, which DeepSpeed's hooks, and with ZeRO-3 its caches, would keep in memory.

        One method of ZeRO-3's coordinator has an lru_cache whose keys hold the coordinator, and with it the model.
        `destroy` leaves it, and there is no plain way to clear it: DeepSpeed wraps the method in a function without
        `__wrapped__`, so that only the wrapper's closure leads to the cache.
        """
        self.engine.destroy()
        FWD_MODULE_STACK.clear()
        for method in vars(PartitionedParameterCoordinator).values():
            for cell in getattr(method, "__closure__", None) or ():
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()

    @property
    def lr(self) -> float:
        """The learning rate of the next update, a function of the number of updates made, which is in checkpoints."""
        made = self.engine.global_steps - self.engine.skipped_steps
        return learning_rate(self._own or self.config.train, made, self.config.train.updates)

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm of the last update, before clipping."""
        norm = self._skipped_norms[0] if self._skipped_norms else self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


def _without_ranks(out: Any) -> Any:
    """The output of a micro-batch with its losses divided by the number of ranks, and detached."""
    ranks = dist.get_world_size()
    out = out._replace(loss=out.loss.detach() / ranks)
    if not hasattr(out, "stats"):  # not a policy's
        return out
    stats = {name: value / ranks if name.startswith("loss_") else value for name, value in out.stats.items()}
    return out._replace(stats=stats)


@contextmanager
def _norm_limit(optimizer: Any, limit: float) -> Iterator[list[float]]:
    """Make DeepSpeed's optimizer skip a step whose global gradient norm is above `limit`; yields a list for that norm.

    DeepSpeed computes the norm inside its step. If it is infinite, DeepSpeed clears the gradients and leaves weights
    and moments as they are. So a norm above the limit is reported as infinite; the norm is global, so all ranks do the
    same. There is no plain way: DeepSpeed has no setting for such a limit, clears the flag `overflow` when its step
    begins, and hands out gradients one parameter at a time: a norm before the step would be a second pass, with code
    for each ZeRO stage. Clipping to 0 would still decay weights and moments.
    """
    stage3 = hasattr(optimizer, "_get_norm_groups")  # which has no method for the norm of all groups
    name = "_get_norm_groups" if stage3 else "scaled_global_norm"
    compute = getattr(optimizer, name)
    above = list[float]()

    def limited() -> Any:
        norms = compute()
        norm = float(combine_grad_norm_groups(norms if stage3 else [norms]))
        if not limit < norm < inf:
            return norms
        above.append(norm)
        return [inf] if stage3 else inf

    setattr(optimizer, name, limited)
    try:
        yield above
    finally:
        delattr(optimizer, name)


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    """torch's deterministic algorithms; RuntimeError from torch for an operation that has none."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it would fill the head's scratch for each call
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def learning_rate(train: TrainConfig | Optimization, made: int, updates: int) -> float:
    """The learning rate of the update that follows `made` others, in a run of `updates` updates.

    In the w updates of the warm-up: lr (made + 1) / w. Afterwards, with x = (made - w) / (updates - w), at most 1, the
    progress after the warm-up: lr times 1, m + (1 - m) (1 - x), or m + (1 - m) (1 + cos(pi x)) / 2, where m is
    lr_min_ratio. These are transformers' schedules, except that there the first update of the warm-up has an lr of 0.
    """
    # 0.07 * 100 is 7.000000000000001, which must not become 8 updates.
    warmup = train.warmup_steps if train.warmup_ratio is None else ceil(train.warmup_ratio * updates - 1e-9)
    if made < warmup:
        return train.lr * (made + 1) / warmup
    left = 1 - min(1.0, (made - warmup) / max(1, updates - warmup))
    share = {"constant": 1.0, "linear": left, "cosine": (1 - cos(pi * left)) / 2}[train.lr_schedule]
    return train.lr * (train.lr_min_ratio + (1 - train.lr_min_ratio) * share)


def this_device() -> torch.device:
    """The current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@torch.no_grad()
def _first_nonfinite(lm: nn.Module, device: torch.device) -> str:
    """The first parameter with NaN or infinity on any rank; under ZeRO-3 each looks at its shard."""
    names = []
    extremes = [torch.zeros(2, device=device)]
    parameter: Any
    for name, parameter in lm.named_parameters():
        own = parameter.flatten()
        if hasattr(parameter, "ds_tensor"):
            shard = parameter.ds_tensor.flatten()
            own = shard[: max(0, parameter.ds_numel - dist.get_rank() * len(shard))]  # the last shard's end is padding
        names.append(name)
        # The extremes of values that include NaN are NaN. This needs no temporary as large as the parameter.
        extremes.append(torch.stack(own.aminmax()).to(device, torch.float32) if len(own) else extremes[0])
    finite = torch.stack(extremes).isfinite().all(1).tolist()
    first = -int(agree.largest(-finite.index(False) if False in finite else -len(finite)))
    return names[first - 1] if first < len(finite) else ""


def _adamw(config: TrainConfig, parameters: list[nn.Parameter], own: Optimization | None) -> torch.optim.Optimizer:
    """torch's AdamW; bitsandbytes' of 8 bits; DeepSpeed's, compiled on first use, if it is offloaded from a GPU."""
    kind: Any = torch.optim.AdamW
    if config.optimizer == "adamw8bit":
        check_installed("train.optimizer adamw8bit")
        from bitsandbytes.optim import AdamW8bit

        kind = AdamW8bit
    if config.offload_optimizer == "cpu" and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        kind = DeepSpeedCPUAdam
    decay = config.weight_decay if own is None or own.weight_decay is None else own.weight_decay
    lr = (own or config).lr  # each step sets its own
    optimizer: torch.optim.Optimizer = kind(parameters, lr=lr, betas=config.betas, weight_decay=decay)
    return optimizer


def _compile_layers(lm: PreTrainedModel) -> None:
    """Compile each layer in place, with dynamic lengths; identical layers share the compiled code."""
    kinds = set(lm._no_split_modules or ())
    layers = [module for module in lm.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ValueError(f"train.compile: want a model that names its layers' class; {type(lm).__name__} names none")
    for layer in layers:
        layer.compile(dynamic=True)
