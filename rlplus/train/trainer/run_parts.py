"""How a run begins: its parts are made, and restored from a checkpoint if it resumes."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rlplus.common import agree
from rlplus.common.agree import initialize_distributed
from rlplus.common.terminal import Terminal
from rlplus.train import checkpoint
from rlplus.train.config import Config, check_trackers
from rlplus.train.data import (
    Example,
    PromptSampler,
    ends_text,
    find_ends,
    load_examples,
    load_tokenizer,
    response_text,
    turn_warning,
    variants,
)
from rlplus.train.learner import (
    Learner,
    Policy,
    check_positions,
    prepare_model,
    say_dropout,
    weights_fingerprint,
    write_pretrained,
)
from rlplus.train.learner.resharding import load_resharded
from rlplus.train.recipe import make_recipe
from rlplus.train.reward import DemonstrationReport, RewardOrStatus, Scorer, grade_demonstrations, keep_passed
from rlplus.train.rollout import RolloutEngine, make_engine, make_respond
from rlplus.train.rollout.shared_engine import SharedEngine
from rlplus.train.trainer.engine import PROBES, NoEngine, SyncedEngine
from rlplus.train.trainer.metrics import RunLog
from rlplus.train.trainer.progress import Progress, StopSignal, naming_phase
from rlplus.train.trainer.provenance import device_name
from rlplus.train.trainer.reporter import Reporter
from rlplus.train.trainer.rollouts import Rollouts
from rlplus.train.trainer.run import Run, StepStart, engines, restore, where_nonfinite
from rlplus.train.trainer.run_folder import RunFolder
from rlplus.train.trainer.trackers import open_trackers


@dataclass(frozen=True)
class Prompts:
    """The prompts that a run draws from.

    examples: those that it trains on. variants: for each prompt, the examples that stand for it, see
    `rlplus.train.data.variants`. verdicts: on the demonstrations that were loaded, in order, and `graded` their counts;
    empty and None where the algorithm takes none.
    """

    examples: list[Example]
    variants: list[list[int]]
    verdicts: list[RewardOrStatus]
    graded: DemonstrationReport | None

    def refusals(self, config: Config) -> Iterator[str]:
        """Reasons for which a run with this configuration refuses them."""
        if self.graded is not None and self.graded.dropped_share > (allowed := config.data.max_dropped_share):
            yield f"{self.graded.summary()}; want at most data.max_dropped_share={allowed:g} dropped"
        yield from config.algorithm.resolve().recipe.refusals(self.examples)
        try:
            PromptSampler(len(self.variants), config.train.prompts_per_step, config.train.seed)
        except ValueError as error:
            yield str(error)


def select_prompts(
    config: Config,
    examples: Sequence[Example],
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
    verdicts: Sequence[RewardOrStatus] = (),
) -> Prompts:
    """The prompts in loaded examples. Collective.

    verdicts: an earlier grading's; without any the demonstrations are graded, where the algorithm takes them.
    """
    algorithm = config.algorithm.resolve()
    kept = list(examples)
    graded = None
    if algorithm.needs_demonstrations:
        verdicts = verdicts or grade_demonstrations(examples, scorer, decode)
        kept, graded = keep_passed(examples, verdicts)
    shows = algorithm.recipe.demonstration_prompt and not algorithm.recipe.shows_responses
    if not algorithm.generates or shows:
        kept = [example for example in kept if example.demonstration is not None]
    return Prompts(kept, variants(kept, config.data.demonstration_choice), list(verdicts), graded)


class AlreadyFinished(Exception):
    """There is nothing to do: the run to resume is finished, and its model written."""


@contextmanager
def open_run(config: Config, resume: str | None = None) -> Iterator[Run]:
    """A run, whose parts are closed at the end of the block. resume: see `rlplus.train.trainer.train`. Collective.

    The process group stays, for the next run of the process: DeepSpeed keeps references to it. Raises AlreadyFinished,
    and ValueError for an invalid configuration or invalid data.
    """
    with naming_phase("start"), ExitStack() as stack:  # closes what was opened if building fails half-way
        run = _made(config, resume, stack)
        # Imported and built objects stay alive: the collector spent a tenth of the demo's time on them.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        parts = stack.pop_all()
    with parts:
        yield run


def _made(config: Config, resume: str | None, stack: ExitStack) -> Run:
    check_trackers(config)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts; torch wants it
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers hands it on to flash-attn
    initialize_distributed(config.train.collective_timeout_s)
    rank = dist.get_rank()
    world = dist.get_world_size()
    if (each := config.train.prompts_per_update or config.train.prompts_per_step) % world:
        raise ValueError(f"want prompts_per_step and _per_update multiples of the {world} ranks; got {each}")
    folder = RunFolder(config, resume, stack)
    _refuse_finished(config, folder, rank)
    reporter = stack.enter_context(Reporter(folder.path, config.algorithm.preset, world, enabled=rank == 0))
    model_path, model_config = prepare_model(config.model, folder.path, config.train.seed)
    say_dropout(model_config)
    check_positions(config, model_config)
    tokenizer = load_tokenizer(config.model, model_path)
    pad_id: int = tokenizer.pad_token_id
    ends = folder.keep_ends(find_ends(config.model, tokenizer, model_path), tokenizer)
    respond = make_respond(config.rollout.function, tokenizer, model_config.vocab_size, config.rollout.environment)
    scorer = stack.enter_context(Scorer(config.reward, config.data.columns))
    agree.phase("data")
    decode = partial(response_text, tokenizer, prefix=config.data.response_prefix, ends=ends)
    data, notes = _load_data(config, folder, tokenizer, ends, scorer, decode)
    config = config.with_steps(len(data.variants))
    if (epochs := config.train.epochs) is not None:
        notes.append(f"{epochs} epochs of {len(data.variants)} prompts: {config.train.steps} steps")
    recipe = make_recipe(config)
    agree.phase("model")
    policy = Policy(config, model_path, model_config, reference=recipe.algorithm.needs_reference)
    recipe.policy = policy
    recipe.ends = ends
    recipe.build(model_path, model_config, pad_id)
    learners: dict[str, Learner] = {"policy": policy} | dict(recipe.learners)
    _load_learners(learners, folder, stack)
    stop = StopSignal()
    agree.phase("engine")
    place = folder.path / f"model_config/{rank}"
    start_engine = _engine_starter(config, policy, model_path, model_config, ends, pad_id, place)
    engine = SyncedEngine(config, policy, [e.prompt for e in data.examples[:PROBES]], pad_id, start_engine, stop)
    sampler = PromptSampler(len(data.variants), config.train.prompts_per_step, config.train.seed, data.variants)
    rollouts = Rollouts(config, recipe, policy, data.examples, sampler, pad_id, engine, respond)
    stack.callback(rollouts.close)
    progress = Progress(config)
    restore({"progress": progress, "sampler": sampler, "rollouts": rollouts, "recipe": recipe}, folder)
    devices = agree.gathered(device_name())
    if rank == 0:
        folder.begin(devices)
    log = _open_log(config, folder, progress, reporter, stack)
    source = f"rollouts by {engine.engine.name}" if config.needs_engine else "no rollouts, and no engine"
    head = f"head by backend {policy.backend!r}: {policy.why_backend}"
    for note in (*folder.notes, *notes, head, f"{source}; output in {folder.path}"):
        log.say(note)
    stop.install(stack, log.say)
    return Run(
        config=config, rank=rank, world=world, folder=folder, tokenizer=tokenizer, pad_id=pad_id, scorer=scorer,
        examples=data.examples, progress=progress, sampler=sampler, recipe=recipe, policy=policy, learners=learners,
        engine=engine, respond=respond, rollouts=rollouts, start=StepStart(rollouts, recipe), log=log, stop=stop,
        ends=ends,
    )  # fmt: skip


def _refuse_finished(config: Config, folder: RunFolder, rank: int) -> None:
    """AlreadyFinished, after a message, where nothing is left to do."""
    if folder.last is None:
        return
    progress = Progress(config.with_steps(folder.state["sampler"]["n"]))
    progress.restore(folder.state)
    if agree.gathered(progress.finished and folder.has_result)[0]:
        if rank == 0:
            done = f"nothing to do: this run is finished, {progress.step} steps; model in {folder.model}"
            Terminal(stderr=True).print(done)
        raise AlreadyFinished


def _load_data(
    config: Config,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
) -> tuple[Prompts, list[str]]:
    """Examples, whose demonstrations the run's own reward accepts, and prompts; and notes of what was dropped."""
    weights = None if config.model.path is None or dist.get_rank() else weights_fingerprint(config.model.path)
    weights = agree.gathered(weights)[0]
    lora = config.model.lora
    alone = config.rollout.lora == "adapters"
    if lora is not None and (lora.quantization or alone) and config.model.path is not None and weights is None:
        key = "rollout.lora adapters" if alone else "model.lora.quantization"
        raise ValueError(
            f"{key}: want model.path with safetensors, by which a resumed run knows its base; got {config.model.path} "
            "without"
        )
    recipe = config.algorithm.resolve().recipe
    examples, report = load_examples(
        config.data,
        tokenizer,
        max_demonstration_length=config.max_demonstration_length,
        teacher_template=recipe.demonstration_prompt,
        shows_responses=recipe.shows_responses,
        topk=recipe.topk,
        ends=ends,
    )
    folder.set_inputs(weights, examples)
    selected = select_prompts(config, examples, scorer, decode, folder.state.get("verdicts", []))
    if refusals := [*selected.refusals(config)]:
        raise ValueError("; ".join(refusals))
    folder.fixed["verdicts"] = selected.verdicts
    notes = [f"responses end in {ends_text(tokenizer, ends)}", report.summary()]
    if report.plain < report.rows and (warning := turn_warning(tokenizer, ends)):
        notes.insert(1, warning)
    return selected, [*notes, *([selected.graded.summary()] if selected.graded else [])]


def _load_learners(learners: dict[str, Learner], folder: RunFolder, stack: ExitStack) -> None:
    """Load the checkpoint's state into the models, which are closed with the run."""
    for learner in learners.values():
        stack.callback(learner.close)
    if folder.last is not None:
        checkpoint.load(engines(learners), folder.last, load_resharded)
        if what := where_nonfinite(learners):
            raise ValueError(f"{folder.last} has NaN or infinity in {what}: want a checkpoint with finite weights")


def _engine_starter(
    config: Config,
    policy: Policy,
    model_path: str,
    model_config: PretrainedConfig,
    ends: Sequence[int],
    pad_id: int,
    place: Path,
) -> Callable[[], RolloutEngine]:
    """A function that starts the engine. The model configuration, which it reads, is written to `place`."""
    write_pretrained(model_config, str(place))
    if not config.needs_engine:
        return NoEngine
    limits: dict[str, Any] = {
        "max_model_len": config.max_generation_length,
        "end_ids": ends,
        "pad_token_id": pad_id,
    }
    if config.rollout.share_weights:
        return partial(SharedEngine, config.rollout, policy.engine.module.lm, **limits)
    own: dict[str, Any] = {} if (adapters := policy.adapters()) is None else {"adapters": adapters}
    return partial(
        make_engine,
        config.rollout,
        model_path,
        **limits,
        **own,
        dtype=config.model.dtype,
        seed=config.train.seed,
        trust_remote_code=config.model.trust_remote_code,
        config_path=str(place),
    )


def _open_log(config: Config, folder: RunFolder, progress: Progress, reporter: Reporter, stack: ExitStack) -> RunLog:
    trackers = open_trackers(config, folder.path, resumed=folder.last is not None, stack=stack)
    return RunLog(folder.path, progress, reporter, trackers)
