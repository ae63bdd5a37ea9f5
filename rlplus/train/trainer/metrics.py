"""Metrics of a step, over all ranks, for the terminal, metrics.jsonl and TensorBoard."""

import json
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import isfinite, sqrt
from pathlib import Path

import torch
import torch.distributed as dist
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import summary

from rlplus.common import agree
from rlplus.common.durable import write_text
from rlplus.common.textfiles import read_text
from rlplus.loss import PolicyLoss, exploration_weight
from rlplus.train.data import SAMPLES, KeptSample, MicroBatch, Sample, write_kept
from rlplus.train.trainer.progress import Progress, naming_phase
from rlplus.train.trainer.reporter import RECENT, Reporter
from rlplus.train.trainer.trackers import Track


class Tally:
    """Means and maxima of one step, over all ranks."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.means: dict[str, list[float]] = {}
        self.maxima: dict[str, float] = {}

    def mean(self, name: str, total: float, count: float = 1.0) -> None:
        entry = self.means.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(count)

    def maximum(self, name: str, value: float) -> None:
        self.maxima[name] = max(float(value), self.maxima.get(name, float(value)))

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Seconds of a phase on the slowest rank, as time/<phase>. Raises OutOfMemory with its name."""
        agree.phase(phase)
        start = time.perf_counter()
        with naming_phase(phase):
            yield
        name = f"time/{phase}"
        self.maxima[name] = self.maxima.get(name, 0.0) + time.perf_counter() - start

    def reduce(self) -> dict[str, float]:
        """The metrics over all ranks; a mean of nothing is omitted. Collective."""
        self.maxima["time/step"] = time.perf_counter() - self.started
        whole = Tally()
        for means, maxima in agree.gathered((self.means, self.maxima)):
            for name, (total, count) in means.items():
                whole.mean(name, total, count)
            for name, value in maxima.items():
                whole.maximum(name, value)
        return {name: total / count for name, (total, count) in whole.means.items() if count} | whole.maxima


def tally_samples(tally: Tally, samples: Sequence[Sample]) -> None:
    """Add rewards, lengths, and the shares of groups that all or none of their rollouts solved.

    Masked samples have no reward: their share of the rollouts is reward/masked.
    """
    rollouts = [sample for sample in samples if not sample.demonstration]
    graded = [sample for sample in rollouts if not sample.masked]
    demonstrations = [sample for sample in samples if sample.demonstration]
    for name, part in (("mean", graded + demonstrations), ("internal", graded), ("external", demonstrations)):
        tally.mean(f"reward/{name}", sum(sample.reward for sample in part), len(part))
    tally.mean("response_length/mean", sum(len(sample.response) for sample in rollouts), len(rollouts))
    for sample in rollouts:
        if sample.kept is not None:
            tally.mean("batch/kept_tokens", len(sample.kept.tokens), sum(count > 0 for count in sample.kept.counts))
        for name, value in (sample.metrics or {}).items():
            tally.mean(f"environment/{name}", value)
    tally.mean("response_length/clipped", sum(sample.truncated for sample in rollouts), len(rollouts))
    if rollouts:
        tally.maximum("response_length/max", max(len(sample.response) for sample in rollouts))
    problems = Counter(sample.status for sample in rollouts)
    tally.mean("reward/masked", len(rollouts) - len(graded), len(rollouts))
    for problem in ("cut_off", "no_box", "unparsed", "timeout", "crash", "bad_gold"):
        tally.mean(f"reward/{problem}", problems[problem], len(rollouts))
    groups: dict[int, list[float]] = {}
    for sample in graded:
        groups.setdefault(sample.group, []).append(sample.reward)
    tally.mean("batch/solve_all", sum(min(group) >= 1 for group in groups.values()), len(groups))
    tally.mean("batch/solve_none", sum(max(group) <= 0 for group in groups.values()), len(groups))


def tally_segments(tally: Tally, samples: Sequence[Sample], step: int) -> None:
    """Add the ages of sampled tokens, in steps."""
    parts = [(step - version, tokens) for sample in samples for version, tokens in sample.segments]
    tally.mean("batch/staleness", sum(age * tokens for age, tokens in parts), sum(tokens for _, tokens in parts))
    tally.maximum("batch/staleness_max", max((age for age, _ in parts), default=0))


def tally_outputs(tally: Tally, outputs: Sequence[PolicyLoss]) -> None:
    """Add the statistics of one update's micro-batches."""
    total = {name: float(torch.stack([out.stats[name] for out in outputs]).sum()) for name in outputs[0].stats}
    once = 1.0 if dist.get_rank() == 0 else 0.0  # losses are sums over ranks, of normalised parts
    for name in ("loss_internal", "loss_external", "loss_kl", "loss_entropy"):
        tally.mean(f"actor/{name}", total[name], once)
        tally.mean("actor/loss", total[name], once if name == "loss_internal" else 0.0)
    for metric, name, count in (
        ("entropy", "entropy", "tokens"),
        ("entropy_internal", "entropy_internal", "tokens_internal"),  # demonstrations left out
        ("active_rows", "active_rows", "tokens"),
        ("prob_internal", "prob_internal", "tokens_internal"),
        ("prob_external", "prob_external", "tokens_external"),
        ("ratio_external_mean", "ratio_external", "tokens_external"),
        ("kl_old", "kl_old", "tokens_internal"),
        ("clip_fraction_low", "clipped_low", "tokens_internal"),
        ("clip_fraction_high", "clipped_high", "tokens_internal"),
    ):
        tally.mean(f"actor/{metric}", total[name], total[count])
    if "sampled_square" in total:
        square = total["sampled_square"]
        tally.mean("actor/backward_noise", sqrt(total["sampled_variance"] / square) if square else 0.0, square > 0)
        tally.mean("actor/backward_elements", total["sampled_elements"], total["tokens"])
        tally.mean("actor/backward_flat_rows", total["sampled_flat"], total["tokens"])
    if "mismatch_truncated" in total:  # there is a cap
        tally.mean("mismatch/truncated", total["mismatch_truncated"], total["tokens_internal"])


def tally_update(tally: Tally, grad_norm: float | None, lr: float, finite: bool) -> None:
    """Add what one optimizer step did. finite: whether its gradient was."""
    tally.mean("actor/nonfinite", not finite)
    tally.mean("actor/lr", lr)
    if finite and grad_norm is not None:
        tally.mean("actor/grad_norm", grad_norm)


def tally_demonstrated(
    tally: Tally, batches: Sequence[MicroBatch], outputs: Sequence[PolicyLoss], gamma: float
) -> None:
    """Add the mean logprob and exploration weight of an update's demonstrated tokens."""
    for batch, out in zip(batches, outputs, strict=True):
        logprob = out.logprob[batch.external & (batch.token_weight != 0)]
        tally.mean("actor/logprob_external", float(logprob.sum()), logprob.numel())
        tally.mean("actor/exploration_weight", float(exploration_weight(logprob, gamma).sum()), logprob.numel())


def tally_mismatch(tally: Tally, logprob: Tensor, engine_logprob: Tensor) -> None:
    """Add the gap between the trainer's and the rollout engine's logprob of the same tokens (N,); NaN = not sampled.

    A non-finite logprob of the trainer is left out: it makes the gradient non-finite, which is counted.
    """
    gap = (logprob - engine_logprob)[logprob.isfinite() & ~engine_logprob.isnan()].double()
    if gap.numel():
        tally.mean("mismatch/mean", float(gap.abs().sum()), gap.numel())
        tally.mean("mismatch/outside_10pct", float((torch.expm1(gap).abs() > 0.1).sum()), gap.numel())
        tally.maximum("mismatch/max", float(gap.abs().max()))


logger = logging.getLogger(__name__)


class Board:
    """A new file of events in `folder`, to which each call appends at once. Events of earlier files from `step` on go.

    Nothing of the run depends on it: after a failure, on a full disk say, it warns and writes no more. torch's own
    writer has a thread, which then ends with a traceback, and the run with it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._file = folder / f"events.out.tfevents.{time.time():.0f}.{platform.node()}.{os.getpid()}"
        self._failed = False
        version = {"file_version": "brain.Event:2"}
        begun = {"session_log": SessionLog(status=SessionLog.START)}
        self._append([Event(**version), Event(step=step, **version), Event(step=step, **begun)])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics."""
        self._append([Event(step=step, summary=summary.scalar(name, value)) for name, value in metrics.items()])

    def add_text(self, name: str, text: str, step: int) -> None:
        """Markdown."""
        self._append([Event(step=step, summary=summary.text(name, text))])

    def _append(self, events: list[Event]) -> None:
        if self._failed:
            return
        records = RecordWriter(content := BytesIO())
        for event in events:
            event.wall_time = time.time()
            records.write(event.SerializeToString())
        try:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("ab") as file:
                file.write(content.getvalue())
        except OSError as error:
            logger.warning("TensorBoard will not see the run from here on: could not write %s: %s", self._file, error)
            self._failed = True


class RunLog:
    """Writes a run's metrics, on rank 0 only, where the reporter is enabled.

    metrics.jsonl has one object per step. Resuming at a step drops the lines after it; when their steps are done again,
    the trackers, which had them, do not get them twice.
    """

    def __init__(self, folder: Path, progress: Progress, reporter: Reporter, trackers: Sequence[Track] = ()) -> None:
        self.enabled = reporter.enabled
        self.reporter = reporter
        step = progress.step
        if not self.enabled:
            return
        self.samples = folder / SAMPLES
        self.path = folder / "metrics.jsonl"
        self.trackers = trackers
        before = {line: _step_of(line, self.path) for line in _complete_lines(self.path)}
        kept = [line for line, line_step in before.items() if line_step <= step]
        self._tracked = max(before.values(), default=0) if step else 0  # a run that begins anew is one of its own
        write_text(self.path, "".join(f"{line}\n" for line in kept))
        self.board = Board(folder / "tensorboard", step + 1)
        reporter.follow(progress, [json.loads(line) for line in kept[-RECENT - 1 :]])

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One step's line, which is JSON: a number that is not finite is said, and has no place in it."""
        if not self.enabled:
            return
        finite = {name: value for name, value in metrics.items() if isfinite(value)}
        if others := ", ".join(f"{name} is {value:g}" for name, value in metrics.items() if name not in finite):
            self.say(f"step {step}: left out of metrics.jsonl: {others}")
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step} | finite, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a step's line reaches the disk before its checkpoint
        except OSError as error:  # the error itself does not name the file
            raise OSError(f"could not write the metrics of step {step} to {self.path}: {error}") from error
        self.board.add(step, metrics)
        if step > self._tracked:
            for track in self.trackers:
                track(step, metrics)
        self.reporter.step(metrics)

    def keep(self, step: int, samples: Sequence[KeptSample]) -> None:
        """Write the samples of a step, before `write`: a step that is logged has them."""
        if not self.enabled:
            return
        write_kept(self.samples / f"step-{step:06d}.parquet", samples)
        texts = (f"{sample.heading}\n\n{sample.prompt}\n---\n{''.join(sample.tokens)}\n" for sample in samples)
        lines = "\n".join(texts).splitlines()
        self.board.add_text("samples", "\n".join(f"    {line}" for line in lines), step)  # code in Markdown

    def say(self, message: str) -> None:
        self.reporter.say(message)


def _step_of(line: str, path: Path) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: want lines with a step; got {line[:80]!r}. Mend or move it") from error


def _complete_lines(path: Path) -> list[str]:
    """Lines of a JSONL file; an incomplete last line, left by a killed process, is dropped."""
    if not path.exists():
        return []
    text = read_text(path)
    return text[: text.rfind("\n") + 1].splitlines()
