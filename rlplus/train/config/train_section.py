"""The section about a step: its prompts, its optimizer, and the placement of the model."""

from math import ceil
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlplus.common.section import Count, Fraction, NonNegative, Positive, Seconds, Section

# DeepSpeed's keys that would change the loss's normalisation, or be ignored beside the trainer's own.
OWNED = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
OWNED |= {"optimizer", "scheduler", "fp16"}
LARGEST = 3.4e38  # float32


def _as_count(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


class TrainConfig(Section):
    """Steps: `prompts_per_step` groups are generated and trained on in mini-batches of `prompts_per_update`."""

    steps: Count | None = None
    """Steps of the run."""
    epochs: Count | None = None
    """Passes over the data, in place of steps: ceil(epochs * prompts / prompts_per_step) steps. Without
    algorithm.refill that is so many passes over the prompts (sft, dft: over those with an accepted demonstration), the
    last step filled from the next pass."""
    generated_tokens: Count | None = None
    """The run also ends with the first step after which so many tokens have been generated."""
    prompts_per_step: Count = 128
    """Groups per step."""
    prompts_per_update: Count | None = None
    """Groups per optimizer step; None = all of the step's."""
    tokens_per_micro_batch: Count = 32768
    """Most tokens of one forward pass on a rank, padding included."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW. adamw8bit: its moments have 8 bits each, rounded in blocks of 256 by bitsandbytes (Dettmers et al., 2022);
    results differ from adamw's."""
    lr: Positive = 1e-6
    """Learning rate of AdamW."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Weight decay of AdamW."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of lr after the warm-up, until the last of the mini-batches of all steps: constant; cosine or linear: down
    to lr_min_ratio of lr, where it stays for updates beyond. An update that was skipped, or had no gradient, does not
    count, as it does not for AdamW."""
    lr_min_ratio: Fraction = 0.0
    """Smallest lr, as a share of lr."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which lr grows to its value."""
    warmup_ratio: Fraction | None = None
    """Warm-up, in place of warmup_steps, as a share of the run's updates, rounded up."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    zero_stage: Literal[1, 2, 3] = 1
    """Sharding over the ranks: 1 optimizer state, 2 + gradients, 3 + weights."""
    shard_head: bool = False
    """With ZeRO 3: leave the policy's head in shards, and gather all ranks' hidden states in its place. Less memory and
    less to send where all ranks' tokens of a micro-batch are fewer than the vocabulary."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where the optimizer state is kept. cpu: in host memory, by DeepSpeed."""
    offload_params: Literal["none", "cpu"] = "none"
    """Place of the weights. cpu: with ZeRO 3, DeepSpeed keeps them in host memory."""
    sequence_parallel: Count = 1
    """Neighbouring ranks that share each sequence (DeepSpeed-Ulysses); it must divide the ranks and the model's
    attention heads."""
    compile: bool = False
    """torch.compile the model's layers."""
    deterministic: bool = False
    """Forward and backward passes of updates by torch's deterministic algorithms, and flash-attn's, for the same bits
    again on a GPU; may take longer. An operation of torch that has none is an error; kernels of other packages are not
    looked at."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # numpy's range of seeds
    """Seed of the data's order, of sampling and of new weights."""
    deepspeed: dict[str, Any] = {}
    """Keys that are merged last into the configuration of DeepSpeed, which ignores keys that it does not know.
    data_types.grad_accum_dtype and communication_data_type are fp32; bf16 takes less memory and rounds each sum."""
    backend: Literal["auto", "reference", "torch", "cpp", "triton"] = "auto"
    """Backend of the head, see rlplus.linear_policy_loss."""
    max_scratch_mb: Count | None = None
    """Scratch memory of the head, see rlplus.linear_policy_loss."""
    backward: Literal["exact", "sampled"] = "exact"
    """Backward pass of the policy's head, see rlplus.linear_policy_loss. sampled: unbiased, for little more than the
    time of its forward pass; actor/backward_noise is the relative error of a policy loss. Seeds follow from seed,
    update, micro-batch and rank, so that a resumed run has the same."""
    backward_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Probability from which backward sampled has elements exactly: a smaller one takes more time and leaves less
    noise. None: the default of rlplus.linear_policy_loss."""
    collective_timeout_s: Seconds = 3600.0
    """Seconds that ranks wait for one that is still busy; one that died is noticed at once."""
    max_nonfinite: Count = 3
    """Updates in a row with a non-finite loss or gradient that stop the run; each is skipped."""
    overlap: Annotated[int, Field(ge=0, le=1000), BeforeValidator(_as_count)] = 0
    """k > 0: generate batches while others train. Weights are pushed every k steps, so a batch is 1 to k steps old; the
    ratio is to the policy that sampled it. true is 1, false 0."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"want exactly one of steps and epochs; got {'neither' if self.steps is None else 'both'}")
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError(
                "want at most one of warmup_steps and warmup_ratio; "
                f"got warmup_steps {self.warmup_steps}, warmup_ratio {self.warmup_ratio:g}"
            )
        if self.generated_tokens is not None and self.lr_needs_length:
            raise ValueError(
                "lr_schedule cosine and linear and warmup_ratio want the number of updates, which generated_tokens "
                "makes unknown: leave it out"
            )
        return self

    @property
    def lr_needs_length(self) -> bool:
        """Whether the learning rate depends on the number of updates that the run will have."""
        return self.lr_schedule != "constant" or self.warmup_ratio is not None

    def steps_of(self, prompts: int) -> int:
        """Steps of the run on data with that many prompts."""
        return ceil((self.epochs or 0) * prompts / self.prompts_per_step) if self.steps is None else self.steps

    @property
    def updates(self) -> int:
        """Mini-batches in all steps, whose number must be known; a recipe may add further updates."""
        assert self.steps is not None, "want a configuration with_steps"
        return self.steps * (self.prompts_per_step // (self.prompts_per_update or self.prompts_per_step))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompts_per_update is not None and self.prompts_per_step % self.prompts_per_update:
            raise ValueError(
                f"want prompts_per_update to divide prompts_per_step; "
                f"got prompts_per_update {self.prompts_per_update}, prompts_per_step {self.prompts_per_step}"
            )
        if self.betas[0] == 1 or self.betas[1] == 1:
            raise ValueError(f"want betas below 1; got {list(self.betas)}")
        if self.lr / (1 - self.betas[0]) > LARGEST:
            raise ValueError(f"want an lr whose first step, lr / (1 - betas[0]), is a float32; got lr {self.lr:g}")
        zero = self.deepspeed.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(f"deepspeed.zero_optimization: want a section of keys and values; got {zero!r}")
        if zero.get("stage", self.zero_stage) != self.zero_stage:
            raise ValueError(
                f"deepspeed.zero_optimization.stage: want it from zero_stage {self.zero_stage}; got {zero['stage']}"
            )
        for name in ("offload_optimizer", "offload_param"):
            if not isinstance(zero.get(name) or {}, dict):
                raise ValueError(
                    f"deepspeed.zero_optimization.{name}: want a section of keys and values; got {zero[name]!r}"
                )
        if owned := sorted(OWNED & self.deepspeed.keys()):
            raise ValueError(f"deepspeed.{owned[0]}: leave it out, the trainer sets micro-batches, AdamW and dtype")
        if self.backward == "sampled" and self.backend == "reference":
            raise ValueError("backward sampled: want another backend than reference; got reference")
        if self.offload_params != "none" and self.zero_stage < 3:
            raise ValueError(f"offload_params needs weights in shards: want zero_stage 3; got {self.zero_stage}")
        if self.optimizer == "adamw8bit" and self.offload_optimizer == "cpu":
            raise ValueError("optimizer adamw8bit stays on the GPU: want offload_optimizer none; got cpu")
        if self.shard_head and (self.zero_stage < 3 or self.backend == "reference"):
            got = f"zero_stage {self.zero_stage}, backend {self.backend}"
            raise ValueError(f"shard_head: want zero_stage 3 and another backend than reference; got {got}")
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile does not go with the hooks of ZeRO-3: want zero_stage 1 or 2; got 3")
        return self
