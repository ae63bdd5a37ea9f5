"""python -m experiments.real.timed_trainers TRAINER FOLDER: one trainer of `steps.py`, timed step by step.

FOLDER has run.yaml and settings.json, and gets measured.json. TRL is imported where it is asked for only.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from rlplus.bench.measure import new_peak, status_mb
from rlplus.common.durable import write_text
from rlplus.train.config import Config, load_config
from rlplus.train.data import Example, MicroBatch, PromptSampler, find_ends, load_examples, load_tokenizer
from rlplus.train.recipe import Update
from rlplus.train.trainer.loop import train_step
from rlplus.train.trainer.metrics import Tally
from rlplus.train.trainer.run_parts import open_run

from .boxed import rewards
from .steps import PHASES, Settings

# Names under which TRL 1.16 profiles parts of itself, of which none is inside another but for the first.
PROFILED = {
    "_prepare_inputs": "inputs",
    "transformers.generate": "generate",
    "vLLM.generate": "generate",
    "sync_weights": "sync",
    "_calculate_rewards": "score",
}
LOGPROBS = "_get_per_token_logps_and_entropies"


class Clock:
    """Seconds and sequences of the step under way and of finished ones, and the peak of memory since the first.

    "processor": this process's time on all cores, which other processes do not lengthen much.
    Each sequence: its tokens, those with a loss, and whether it had a backward pass.
    """

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.steps: list[dict[str, Any]] = []
        self.seconds = defaultdict[str, float](float)
        self.sequences: list[tuple[int, int, bool]] = []
        self.computed = 0  # positions, padding included
        self.used = self.began = self.last = self.busy = 0.0

    def read(self) -> float:
        """The time when the GPU has done what it was given. Its memory in use is looked at, too."""
        if self.cuda:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.used = max(self.used, float(total - free))
        self.last = time.perf_counter()
        return self.last

    def begin(self) -> None:
        """The first step begins, and memory's peaks start anew."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            new_peak()
        self.began, self.busy = self.read(), time.process_time()

    def end_step(self) -> None:
        before, self.began = (self.began, self.busy), self.read()
        self.busy = time.process_time()
        seconds = dict(self.seconds) | {"step": self.began - before[0], "processor": self.busy - before[1]}
        self.steps.append({"seconds": seconds, "tokens": {"computed": self.computed}, "sequences": self.sequences})
        self.seconds, self.sequences, self.computed = defaultdict(float), [], 0

    def memory(self) -> dict[str, float]:
        """Peaks in bytes."""
        if self.cuda:
            return {"allocated": float(torch.cuda.max_memory_allocated()), "device_used": self.used}
        return {"resident": status_mb("VmHWM") * 1e6}


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of the owner have these values in the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def time_rlplus(config: Config, settings: Settings, clock: Clock) -> None:
    """Steps as `rlplus train` takes them, without the checkpoint at the end. Phases have the names in metrics.jsonl."""
    timed = Tally.time

    @contextmanager
    def time_whole(tally: Tally, phase: str) -> Iterator[None]:
        clock.read()  # a GPU's work counts in the phase that asked for it
        with timed(tally, phase):
            yield
            clock.read()

    with open_run(config) as run:
        accumulate = run.recipe.accumulate

        def counted(update: Update, batches: Sequence[MicroBatch], *rest: Any) -> Any:
            still = sum(batch.tokens for batch in batches if batch.forward_only)
            for sample in update.samples:
                backward = bool(sample.external) or sample.advantage != 0
                clock.sequences.append((sample.length, sum(sample.loss_tokens), backward))
            if still != sum(tokens for tokens, _, backward in clock.sequences if not backward):
                raise SystemExit(f"want the samples without an advantage in {still} tokens of forward passes alone")
            clock.computed += sum(batch.input_ids.numel() for batch in batches)
            return accumulate(update, batches, *rest)

        if len(run.sampler.variants) != settings.prompts * settings.steps:
            raise SystemExit("want all of the data's demonstrations accepted by boxed.py: the trainers' prompts differ")
        with replaced(Tally, time=time_whole), replaced(run.recipe, accumulate=counted):
            clock.begin()
            for _ in range(settings.steps):
                train_step(run)
                clock.end_step()
        lines = (run.folder.path / "metrics.jsonl").read_text().splitlines()
    for step, metrics in zip(clock.steps, map(json.loads, lines), strict=True):
        step["seconds"] |= {phase: metrics.get(f"time/{phase}", 0.0) for phase in PHASES[:-1]}
        step["loss"] = metrics["actor/loss"]
        if settings.task == "grpo":
            step["reward"] = metrics["reward/mean"]


def time_trl(config: Config, settings: Settings, clock: Clock, patched: bool) -> None:
    with ExitStack() as stack:
        if patched:
            from rlplus.integrations.trl import patch

            stack.enter_context(patch())
        stack.enter_context(profiled(clock))
        trainer = (sft_trainer if settings.task == "sft" else grpo_trainer)(config, settings)
        watch(trainer, clock)
        trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    for step, row in zip(clock.steps, logged, strict=True):
        seconds = step["seconds"]
        seconds["forward_backward"] = seconds.pop("training_step") - seconds.pop("inputs", 0.0)
        step["loss"] = row["loss"]
        if settings.task == "grpo":
            step["reward"] = row["reward"]
            if missing := {"generate", "score"} - seconds.keys():
                raise SystemExit(f"want TRL 1.16, which profiles {', '.join(PROFILED)}; got no {min(missing)}")


def watch(trainer: Any, clock: Clock) -> None:
    """Let the trainer's steps and passes tell the clock."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **more: Any) -> None:
            clock.begin()

        def on_optimizer_step(self, *_: Any, **more: Any) -> None:
            last = clock.last  # the end of the last backward pass: clipping is the optimizer's, as in DeepSpeed
            clock.seconds["optimizer"] += clock.read() - last

        def on_step_end(self, *_: Any, **more: Any) -> None:
            clock.end_step()

    take_step, compute_loss = trainer.training_step, trainer.compute_loss

    def training_step(*given: Any, **more: Any) -> Any:
        began = clock.read()
        loss = take_step(*given, **more)
        clock.seconds["training_step"] += clock.read() - began
        return loss

    def counted(model: Any, inputs: dict[str, Any], *given: Any, **more: Any) -> Any:
        if "completion_mask" in inputs:
            tokens, trained = inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1)
            tokens, computed = tokens + trained, inputs["prompt_mask"].numel() + inputs["completion_mask"].numel()
        else:
            tokens, trained = inputs["attention_mask"].sum(1), (inputs["labels"] != -100).sum(1)
            computed = inputs["input_ids"].numel()
        clock.sequences += zip(tokens.tolist(), trained.tolist(), [True] * len(tokens), strict=True)
        clock.computed += computed
        return compute_loss(model, inputs, *given, **more)

    trainer.training_step, trainer.compute_loss = training_step, counted
    trainer.add_callback(Steps())


@contextmanager
def profiled(clock: Clock) -> Iterator[None]:
    """Let TRL's own profile tell the clock. Logprobs without gradients are the old policy's."""
    from trl.extras.profiling import ProfilingContext

    def enter(context: Any) -> Any:
        context._start_time = clock.read()
        return context

    def leave(context: Any, *_: Any) -> bool:
        name = context.name.partition(".")[2]
        if name == LOGPROBS and not torch.is_grad_enabled():
            clock.seconds["old_logprob"] += clock.read() - context._start_time
        elif name in PROFILED:
            clock.seconds[PROFILED[name]] += clock.read() - context._start_time
        return False

    with replaced(ProfilingContext, __enter__=enter, __exit__=leave):
        yield


def trl_settings(config: Config, settings: Settings) -> dict[str, Any]:
    """Fields of TRL's configurations that make its update rlplus's."""
    train, cuda = config.train, torch.cuda.is_available()
    return {
        "output_dir": config.output_dir, "max_steps": settings.steps, "seed": train.seed, "bf16": True,
        "use_cpu": not cuda, "dataloader_pin_memory": cuda, "learning_rate": train.lr, "lr_scheduler_type": "constant",
        "weight_decay": train.weight_decay, "adam_beta1": train.betas[0], "adam_beta2": train.betas[1],
        "max_grad_norm": train.grad_clip, "per_device_train_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.sequences // settings.micro_batch,
        "gradient_checkpointing": settings.checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "model_init_kwargs": {"dtype": settings.trl_weights, "attn_implementation": config.model.attention},
        "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def ordered(config: Config, settings: Settings) -> tuple[list[Example], Any]:
    """The data in the order in which rlplus draws it, and the tokenizer."""
    path = str(config.model.path)
    tokenizer = load_tokenizer(config.model, path)
    ends = find_ends(config.model, tokenizer, path)
    most = config.max_demonstration_length
    examples, _ = load_examples(config.data, tokenizer, max_demonstration_length=most, ends=ends)
    sampler = PromptSampler(len(examples), settings.prompts, config.train.seed)
    return [examples[i] for _ in range(settings.steps) for i in sampler.next()], tokenizer


def sft_trainer(config: Config, settings: Settings) -> Any:
    """TRL's on the token ids of rlplus: prompts without a loss, demonstrations with their end."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    examples, tokenizer = ordered(config, settings)
    whole = [(e.prompt, e.demonstration or ()) for e in examples]
    columns = {"input_ids": [[*prompt, *shown] for prompt, shown in whole]}
    columns["labels"] = [[-100] * len(prompt) + [*shown] for prompt, shown in whole]
    more = {"max_length": None, "train_sampling_strategy": "sequential"}
    return SFTTrainer(
        str(config.model.path),
        args=SFTConfig(**trl_settings(config, settings), **more),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
    )


def grpo_trainer(config: Config, settings: Settings) -> Any:
    """TRL's with GRPO's loss as rlplus's preset has it: the mean over a response, clipped, divided by the std."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    examples, tokenizer = ordered(config, settings)
    prompts = [tokenizer.decode(e.prompt, clean_up_tokenization_spaces=False) for e in examples]
    again = tokenizer(text=prompts)["input_ids"]
    if changed := [p for p, ids, e in zip(prompts, again, examples, strict=True) if ids != [*e.prompt]]:
        raise SystemExit(f"want prompts that TRL tokenises as rlplus does; {changed[0]!r} has other tokens there")
    fixed: dict[str, Any] = {}
    rollout, vllm = config.rollout, settings.engine == "vllm"
    if settings.fixed:
        fixed = {"ignore_eos": True} if vllm else {"min_new_tokens": settings.response}
    longest = config.data.max_prompt_length + settings.response
    engine = {"vllm_max_model_length": longest, "vllm_gpu_memory_utilization": settings.engine_memory} if vllm else {}
    args = GRPOConfig(
        **trl_settings(config, settings), **engine, use_vllm=vllm, vllm_mode="colocate", loss_type="grpo", beta=0.0,
        vllm_importance_sampling_correction=False, scale_rewards="group", num_generations=settings.group,
        max_completion_length=settings.response, temperature=rollout.temperature, top_k=0, top_p=1.0,
        shuffle_dataset=False, generation_kwargs=fixed,
    )  # fmt: skip
    return GRPOTrainer(
        str(config.model.path),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [e.answer for e in examples]}),
        processing_class=tokenizer,
    )


def check_tokens(settings: Settings, clock: Clock) -> None:
    """Set each step's number of generated tokens; SystemExit where --fixed wants another one."""
    for step in clock.steps:
        generated = sum(trained for _, trained, _ in step["sequences"]) if settings.task == "grpo" else 0
        step["tokens"]["generated"] = generated
        if settings.task == "grpo" and settings.fixed and generated != settings.sequences * settings.response:
            raise SystemExit(f"--fixed: want {settings.sequences * settings.response} tokens a step; got {generated}")


def main(trainer: str, folder: Path) -> None:
    settings = Settings(**json.loads((folder / "settings.json").read_text()))
    config = load_config(folder / "run.yaml", [f"output_dir={folder / 'runs'}/{time.time_ns()}"])
    clock = Clock()
    times: dict[str, Callable[[], None]] = {
        "rlplus": lambda: time_rlplus(config, settings, clock),
        "trl": lambda: time_trl(config, settings, clock, patched=False),
        "trl+patch": lambda: time_trl(config, settings, clock, patched=True),
    }
    times[trainer]()
    check_tokens(settings, clock)
    write_text(folder / "measured.json", json.dumps({"steps": clock.steps, "memory": clock.memory()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
