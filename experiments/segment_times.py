"""python -m experiments.segment_times CONFIG [KEY=VALUE ...] --segments N ...: seconds of a step in segments.

`rlplus plan` counts responses as long as allowed. Here lengths are drawn from a log-normal distribution of this median
and sigma, of whose variance the share `--shared` is between prompts, and each GPU's engine is simulated: one sequence
that ends makes room for the next. The constants are the plan's; of the GPUs the slowest counts. What else a step does
is the plan's, for the mean length. `--slots`: sequences at a time; 0: those of the mean length that the cache holds.
"""

import argparse
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplus.tools.plan import make_cluster, make_plan, read_model
from rlplus.tools.plan.memory import sequence_bytes
from rlplus.tools.plan.speed import GEMM_EFFICIENCY, MAX_SEQUENCES, MEMORY_EFFICIENCY
from rlplus.train.config import Config, load_config

STEPS = 10  # that are averaged
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Engine:
    """One GPU's. weights, cache: bytes of the model, and of a token's keys and values. flop: of a token. slots:
    sequences at a time. bandwidth, flops: per second, as far as they are reached."""

    weights: float
    cache: float
    flop: float
    slots: int
    bandwidth: float
    flops: float

    def decode(self, sequences: Iterable[tuple[int, int]]) -> float:
        """Seconds to sample for (tokens that are there, tokens to sample), begun in this order."""
        waiting, running = iter(sequences), list[tuple[int, int]]()  # its last step, its tokens then
        now, context, seconds, left = 0, 0, 0.0, True
        while left or running:
            while left and len(running) < self.slots:
                if left := (item := next(waiting, None)) is not None:
                    heapq.heappush(running, (now + item[1], sum(item)))
                    context += item[0]
            if running:
                n, steps = len(running), np.arange(running[0][0] - now)
                read = (self.weights + self.cache * (context + n * steps)) / self.bandwidth
                seconds += float(np.maximum(read, n * self.flop / self.flops).sum())
                now, context = running[0][0], context + n * len(steps)
            while running and running[0][0] == now:
                context -= heapq.heappop(running)[1]
        return seconds

    def step(self, batches: Lengths, prompt: int, segment: int) -> float:
        """Seconds of its part of a draw: the last segment of the first batch, ..., the first one of the last batch.

        batches: lengths of this GPU's responses, (batches, prompts, members). A prompt is read once, what is there of
        a response before each later segment.
        """
        jobs, read = [], prompt * len(batches[-1])
        for part, batch in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            there = prompt + part * segment
            going = [(there, min(segment, int(left))) for left in batch.ravel() - part * segment if left > 0]
            read += there * len(going) * (part > 0)
            jobs += going
        return read * self.flop / self.flops + self.decode(jobs)


def make_engine(config: Config, gpu: str, gpus: int, mean: int, slots: int = 0) -> Engine:
    """With 0 slots as many as the plan's cache has for sequences of the mean length."""
    cluster, (model, _) = make_cluster(gpus, gpu), read_model(config)
    cache = make_plan(config, cluster).memory.cache
    tokens = config.data.max_prompt_length + mean
    slots = slots or min(MAX_SEQUENCES, cache // sequence_bytes(config, model, tokens))
    if slots < 1:
        raise ValueError(f"want room for a sequence of {tokens} tokens; got {slots} slots")
    if cluster.gpu.bandwidth is None or cluster.gpu.flops is None:
        raise ValueError(f"want a GPU whose speed is known; got {gpu}")
    speed = cluster.gpu.bandwidth * MEMORY_EFFICIENCY, cluster.gpu.flops * GEMM_EFFICIENCY
    return Engine(model.parameters * model.itemsize, model.cache_bytes, 2 * model.parameters, slots, *speed)


def draw(shape: tuple[int, int], median: float, sigma: float, shared: float, most: int, seed: int) -> Lengths:
    """Log-normal lengths, cut at `most`; `shared` of the logarithm's variance is between prompts."""
    rng = np.random.default_rng(seed)
    noise = np.sqrt(shared) * rng.normal(size=(shape[0], 1)) + np.sqrt(1 - shared) * rng.normal(size=shape)
    return np.clip(np.ceil(median * np.exp(sigma * noise)), 1, most).astype(np.int64)


def mean_age(lengths: Lengths, segment: int, waiting: int) -> float:
    """Steps between the draw of a token and its training."""
    parts = [np.clip(lengths - part * segment, 0, segment).sum() for part in range(waiting + 1)]
    return float(sum((waiting - part) * tokens for part, tokens in enumerate(parts)) / lengths.sum())


def measure(config: Config, gpu: str, gpus: int, lengths: tuple[float, float, float], slots: int = 0) -> list[float]:
    """Mean length, slots, seconds of generation, of a step, mean age. lengths: median, sigma, shared."""
    if (config.rollout.mode, config.rollout.tensor_parallel_size, config.train.overlap) != ("colocated", 1, 0):
        got = f"{config.rollout.mode}, {config.rollout.tensor_parallel_size} and {config.train.overlap}"
        raise ValueError(f"want rollout.mode colocated, tensor_parallel_size 1 and train.overlap 0; got {got}")
    longest, segment, waiting = config.rollout.max_response_length, config.rollout.segment, config.rollout.waiting
    members = config.rollout.group_size - config.algorithm.resolve().demonstrates_in_place
    shape = config.train.prompts_per_step // gpus, members
    drawn = np.stack([draw(shape, *lengths, longest, seed) for seed in range(STEPS * gpus * (waiting + 1))])
    mean = round(float(drawn.mean()))
    engine = make_engine(config, gpu, gpus, mean, slots)
    parts = [engine.step(b, config.data.max_prompt_length, segment or longest) for b in np.split(drawn, STEPS * gpus)]
    generation = float(np.reshape(parts, (STEPS, gpus)).max(1).mean())
    rollout = config.rollout.model_copy(update={"max_response_length": mean})
    seconds = make_plan(config.model_copy(update={"rollout": rollout}), make_cluster(gpus, gpu)).seconds
    rest = seconds["total"] - seconds["generate"]
    return [mean, engine.slots, generation, generation + rest, mean_age(drawn, segment or longest, waiting)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--gpu", default="a100-80g")
    for name, default in (("gpus", 8), ("median", 3000.0), ("sigma", 0.8), ("shared", 0.0), ("slots", 0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--segments", type=int, nargs="*", default=[])
    args = parser.parse_args(arguments)
    print("segment  mean  slots  generation s  step s  age  by the plan, all as long as allowed: generation s  step s")
    for segment in (None, *args.segments):
        chosen = [f"rollout.segment={segment}"] if segment else []
        config = load_config(Path(args.config), [*args.overrides, *chosen])
        found = measure(config, args.gpu, args.gpus, (args.median, args.sigma, args.shared), args.slots)
        plan = make_plan(config, make_cluster(args.gpus, args.gpu)).seconds
        row = *found, plan["generate"], plan["total"]
        print("{:>7}  {:4.0f}  {:5}  {:12.0f}  {:6.0f}  {:3.2f}  {:56.0f}  {:6.0f}".format(segment or "whole", *row))


if __name__ == "__main__":
    main()
