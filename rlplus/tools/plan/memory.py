"""The memory of one GPU by part, at those moments of a step that can be the fullest."""

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import torch

from rlplus.common.teacher_states import TeacherStates
from rlplus.loss import MAX_SCRATCH_MB
from rlplus.loss.backends import implementation
from rlplus.loss.backends.native import CHUNK_ROWS
from rlplus.loss.backends.sampled import MOST
from rlplus.loss.backends.selection import choose
from rlplus.loss.operations.linear_losses import THRESHOLD
from rlplus.tools.plan.cluster import GIB, NODE, Cluster
from rlplus.tools.plan.planned_model import Model, packed_shape
from rlplus.train.config import Config
from rlplus.train.learner.deepspeed_settings import check_eight_bit, check_sharded_head, deepspeed_config
from rlplus.train.rollout import DEFAULT_CACHE_MB, LOGIT_BYTES

ADAM_BYTES = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}  # bytes of both for a parameter; of 8 bits with scales
RESERVE = 3 * GIB  # driver, CUDA context, cuBLAS, NCCL's buffers, fragmentation on each GPU. Assumed
ENGINE_ASLEEP = 1 * GIB  # kept by vLLM while it sleeps: CUDA graphs, its context. Assumed
ENGINE_OVERHEAD = 2 * GIB  # vLLM's memory beyond weights and cache: activations, logits, CUDA graphs. Assumed
LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters, and its stage3_max_reuse_distance
SUB_GROUP = 1_000_000_000  # DeepSpeed's sub_group_size: parameters that ZeRO-3 updates at a time

TOPK_PAIR = 16  # bytes of one of a teacher's likeliest tokens: number and logprob, and the number in int64
KEPT_PAIR = 80  # bytes of a token and one of its kept tokens in the head: numbers, logits, slopes, sorted copies
# Tokens of a row in a sampled backward pass at the default threshold; in all rows, of M tokens 5 M^(2/3) are different.
# Both were measured on 2,063 rows of a model of 0.5B (decision 011).
DRAWN = 12
DRAWN_OF_DIVERGENCE = 190  # measured on 300 rows of a model of 135M (decision 015)
MOMENTS = ("generate", "head", "backward", "optimizer")
"""While the engine generates; in the head, where the forward pass ends; at most in the backward pass; in the update."""


@dataclass(frozen=True)
class Memory:
    """Bytes. parts: on a GPU that trains, by moment, then by part. engine: on one that only generates, if any.

    cache: keys and values on an engine's GPU. host: memory of the node.
    """

    parts: dict[str, dict[str, int]]
    engine: dict[str, int]
    capacity: int
    cache: int
    host: int
    problems: tuple[str, ...]

    def total(self, moment: str) -> int:
        return sum(self.parts[moment].values())

    @property
    def peak(self) -> int:
        return max(map(self.total, MOMENTS))

    @property
    def fits(self) -> bool:
        return not self.problems


def estimate_memory(config: Config, model: Model, cluster: Cluster) -> Memory:
    """All memory on one GPU (or of one CPU rank), at each of `MOMENTS`. cluster: the ranks and their GPUs.

    The states of all learners, and the training memory of the one that needs most: they train one after the other.
    """
    if config.train.shard_head:
        check_sharded_head(model.lm, model.vocabulary, cluster.gpus)
    learners = [(learner, model_states(config, learner, cluster)) for learner in model.learners]
    engine, problems = engine_memory(config, model, cluster)
    cache = engine.get("kv cache", 0)
    alone = {}
    if engine and config.rollout.mode == "process" and not cluster.cpu:
        alone = {"reserve": RESERVE} | engine
        engine = {}
    at_rest = {"engine rest": ENGINE_ASLEEP} if engine and config.rollout.sleep else engine
    if config.rollout.engine == "transformers":  # its cache ends with the last response
        at_rest = {name: size for name, size in engine.items() if name == "engine weights"}
    always = {
        "reserve": 0 if cluster.cpu else RESERVE,
        "weights": sum(states.weights for _, states in learners),
        "optimizer states": sum(states.optimizer for _, states in learners),
    }
    algorithm = config.algorithm.resolve()
    references = int(algorithm.needs_reference and config.model.lora is None)
    references += algorithm.recipe.cost.references
    if references:
        always["references"] = references * model.parameters * model.itemsize
    if algorithm.recipe.averaged_teacher:
        always["moving average"] = _moving_average(config, model, cluster)
    if model.teacher is not None:
        always["teacher"] = model.teacher.parameters * model.teacher.itemsize
    if algorithm.recipe.stored_teacher is not None:
        always["teacher's head"] = TeacherStates(algorithm.recipe.stored_teacher).head_bytes
    staying = sum(states.gradients for _, states in learners if states.gradients_stay)
    between = always | ({"gradients": staying} if staying else {})

    def training(learner: Model, states: States) -> dict[str, dict[str, int]]:
        activations = learner.activations(config)
        gradients = (staying or states.gradients) + states.reducing
        passes = always | {"gradients": gradients} | at_rest | {"gathered weights": states.gathered}
        passes |= {"dequantized weights": learner.dequantized}
        if learner.in_shards(config) and not config.model.lora:  # their sum over micro-batches, beside DeepSpeed's own
            passes["gradient of the head's rows"] = 4 * learner.vocabulary * learner.hidden // cluster.gpus
        return {
            "head": passes | {"activations": activations.head, "head": head_memory(config, learner, cluster)},
            "backward": passes | {"activations": activations.backward},
            "optimizer": between | at_rest | {"update": states.update},
        }

    each = [training(learner, states) for learner, states in learners]
    fullest = {moment: max((one[moment] for one in each), key=lambda part: sum(part.values())) for moment in each[0]}
    parts = {"generate": between | engine} | fullest
    capacity = int(cluster.gpu.memory)
    for moment, sizes in (parts | {"engine": alone}).items():
        if (total := sum(sizes.values())) > capacity:
            problems.append(f"{moment}: needs {total / GIB:.1f} GiB of {capacity / GIB:.1f} GiB")
    shown = {moment: _present(sizes) for moment, sizes in parts.items()}
    host = sum(states.host for _, states in learners)
    if config.needs_engine and config.rollout.mode == "process":  # the last push, for an engine that is started again
        host += model.pushed(config)
    return Memory(shown, _present(alone), capacity, cache, host, tuple(problems))


def _present(sizes: dict[str, int]) -> dict[str, int]:
    return {part: size for part, size in sizes.items() if size}


def _moving_average(config: Config, model: Model, cluster: Cluster) -> int:
    """Bytes per rank of the policy's average as a teacher: fp32 in shards; of adapters a copy, as well."""
    T = model.trainable
    return 4 * -(-T // cluster.gpus) + (model.itemsize * T if config.model.lora else 0)


@dataclass(frozen=True)
class States:
    """Bytes per rank; host: per node of up to 8 ranks. gradients_stay: whether they are kept between steps."""

    weights: int
    optimizer: int
    gradients: int
    gradients_stay: bool
    reducing: int
    gathered: int
    update: int
    host: int


def model_states(config: Config, model: Model, cluster: Cluster) -> States:
    """Weights, gradients and AdamW's states; P parameters of b bytes, T of them trained, over R ranks.

    ZeRO (Rajbhandari et al., 2020, section 5) as DeepSpeed 0.19 does it:

    - `weights`: b P, less where they are quantized; stage 3: b P / R; offloaded: 0
    - `optimizer`: 12 T / R: fp32 weights, a second copy also where the model is fp32, and two moments (of 8 bits: 6.03
      T / R); offloaded: 0
    - `gradients`: of g bytes, 4 unless train.deepspeed says otherwise. Stage 1: g T, stages 2 and 3: g T / R; and a
      bucket of g B, B = min(T, reduce_bucket_size), twice that with overlap_comm in stages 1 and 2. Stage 3 keeps both
      between steps. Offloaded: in stage 3, and in stage 2 if g = b, the bucket only
    - `reducing`: if g > b, while the model runs: stage 1 g T / R, the reduced gradient; stages 2 and 3 g max(B, the
      largest parameter), a copy in the collective; stage 3 only if T > B, else it is done after
    - `gathered`: stage 3: b min(P, stage3_max_live_parameters) while the model runs; P without a sharded head
    - `update`: the gradient in fp32, in stages 1 and 2 in place of the one above, and one temporary of AdamW's (on the
      CPU two): 8 T / R; in stage 3 of at most sub_group_size parameters at a time; offloaded: 0
    - `host`: offloaded: 16 T / R (states and fp32 gradients), in stage 3 and in stage 2 if g = b g T / R more, b P / R,
      of each rank of a node
    """
    P = model.parameters
    T = model.trainable
    b = model.itemsize
    R = cluster.gpus
    check_eight_bit(config.train, T, R)
    settings = deepspeed_config(config, T)
    zero = settings["zero_optimization"]
    g = _gradient_bytes(settings, b)
    stage = int(zero["stage"])
    off = _offloaded(zero, "offload_optimizer")
    weights_off = stage == 3 and _offloaded(zero, "offload_param")
    share = -(-T // R)
    bucket = min(_size(zero, "reduce_bucket_size", 500_000_000), T)
    if stage < 3 and zero.get("overlap_comm", False):
        bucket *= 2
    in_host = off and (stage == 3 or (stage == 2 and g == b))
    kept = T if stage == 1 else 0 if in_host else share
    copied = max(bucket, model.largest) if stage == 2 or bucket < T else 0
    live = _size(zero, "stage3_max_live_parameters", LIVE_PARAMETERS)
    at_once = min(share, _size(zero, "sub_group_size", SUB_GROUP)) if stage == 3 else share
    weights = b * -(-P // R) if stage == 3 else model.weight_bytes
    return States(
        weights=0 if weights_off else weights,
        optimizer=0 if off else int((4 + ADAM_BYTES[config.train.optimizer]) * share),
        gradients=g * (kept + bucket),
        gradients_stay=stage == 3,
        reducing=0 if g == b else g * (share if stage == 1 else copied),
        gathered=b * min(P - model.in_shards(config) * model.vocabulary * model.hidden, live) if stage == 3 else 0,
        update=0 if off else 4 * (3 if cluster.cpu else 2) * at_once,
        host=min(R, NODE) * ((16 * share if off else 0) + g * share * in_host + (weights if weights_off else 0)),
    )


def checkpoint_bytes(config: Config, model: Model) -> int:
    """Bytes of one checkpoint: of each learner AdamW's states, see `model_states`, and below stage 3 what is trained of
    its weights, which at stage 3 are rounded from the fp32 ones; and 4 T of a policy whose average is its teacher.
    Frozen weights stay in the model's own files."""
    states = 4 + ADAM_BYTES[config.train.optimizer]

    def bytes_of(learner: Model) -> int:
        stage = int(deepspeed_config(config, learner.trainable)["zero_optimization"]["stage"])
        return int((states + (learner.itemsize if stage < 3 else 0)) * learner.trainable)

    average = 4 * model.trainable if config.algorithm.resolve().recipe.averaged_teacher else 0
    return sum(map(bytes_of, model.learners)) + average


def _gradient_bytes(settings: dict[str, Any], weight_bytes: int) -> int:
    """Bytes of a number of an accumulated gradient: 4, or a weight's. settings: DeepSpeed's configuration."""
    name = (settings.get("data_types") or {}).get("grad_accum_dtype")
    return 4 if name in ("fp32", "float32", "float", "torch.float32") else weight_bytes


def _size(zero: dict[str, Any], key: str, default: int) -> int:
    """A number of parameters, which DeepSpeed also accepts as 5e8 or "5e8"."""
    value = zero.get(key, default)
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"train.deepspeed.zero_optimization.{key}: want a number; got {value!r}") from error


def _offloaded(zero: dict[str, Any], key: str) -> bool:
    return (zero.get(key) or {}).get("device", "none") != "none"


def head_memory(config: Config, model: Model, cluster: Cluster) -> int:
    """Bytes of the fused head at its end, for N tokens, hidden size H, vocabulary V and weights of b bytes.

    b N H for its input's gradient; (V, H) in b bytes for its weight's gradient and, in half precision, 4 V H for its
    accumulator; and the scratch of `head_scratch`. A frozen weight (LoRA) has no gradient. If gradients of
    half-precision weights are in fp32, the weight's is 4 V H without another accumulator, and in stage 1 it is added to
    the gradients, which `model_states` counts. A sampled backward pass has KEPT_PAIR for each token that is drawn, an
    accumulator of these tokens' rows of the weight alone, and one of 4 N H for the input's gradient. A value head needs
    4 N H for the gradient of its input and, in half precision, 4 N H for a copy of the input in fp32. The policy's
    takes KEPT_PAIR for each of rollout.top_k tokens, the most that a sampler keeps for each token. A head in shards
    needs hidden states of all R ranks and their gradients, 2 b R N H; the gradient of its rows is there in the whole
    pass. With a divergence from a teacher the hidden states of its tokens are beside it, or TOPK_PAIR for each of its
    likeliest tokens if only they are known, and weights' gradients are summed as in other layers.
    """
    N = head_tokens(config)
    H = model.hidden
    V = model.vocabulary
    b = model.itemsize
    own_loss = config.algorithm.resolve().recipe.own_loss
    if model.head == "value":
        return 4 * N * H * (1 if b == 4 else 2)
    if model.in_shards(config):
        return 2 * b * N * H * cluster.gpus + head_scratch(config, model, cluster)
    settings = deepspeed_config(config, model.trainable)
    fp32 = _gradient_bytes(settings, b) > b and config.train.backend != "reference" and not own_loss
    weight = 0 if config.model.lora else b * V * H
    if fp32:
        weight = 0 if config.train.zero_stage == 1 else 2 * weight
    drawn = N * _drawn(config) if config.train.backward == "sampled" and model.head is None else 0
    rows = min(ceil(5 * drawn ** (2 / 3)), V) if drawn else V if b < 4 else 0  # the weight's accumulator has so many
    accumulator = 0 if fp32 or config.model.lora else 4 * rows * H
    accumulator += 4 * N * H if drawn else 0
    beside = KEPT_PAIR * (N * config.rollout.top_k + drawn) if model.head is None else 0
    if topk := config.algorithm.resolve().recipe.topk:
        beside += TOPK_PAIR * N * topk
    elif states := config.algorithm.resolve().recipe.stored_teacher:
        beside += b * N * int(TeacherStates(states).facts["hidden"])
    elif own_loss:
        beside += b * N * (model if model.teacher is None else model.teacher).hidden
    return b * N * H + weight + accumulator + beside + head_scratch(config, model, cluster)


def head_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch, on each rank."""
    rows, length = packed_shape(config)
    return rows * length // config.train.sequence_parallel


def _drawn(config: Config) -> int:
    """Tokens of a row that a sampled backward pass draws: their number grows with the root of 1 / threshold, about."""
    drawn = DRAWN_OF_DIVERGENCE if config.algorithm.resolve().recipe.own_loss else DRAWN
    return min(MOST, ceil(drawn * sqrt(THRESHOLD / (config.train.backward_threshold or THRESHOLD))))


def head_scratch(config: Config, model: Model, cluster: Cluster) -> int:
    """Bytes of logits and their gradients: max_scratch_mb, or less for few tokens.

    Each backend has its bytes per logit, as for a head without a softcap. `reference` keeps all rows at once. A
    divergence takes three times that, of the logits of two heads and what is between (`chunked`); less with `triton`.
    """
    tokens = head_tokens(config)
    vocabulary = model.vocabulary
    if model.in_shards(config):
        tokens = tokens * cluster.gpus
        vocabulary = vocabulary // cluster.gpus
    dtype = getattr(torch, config.model.dtype)
    device = "cpu" if cluster.cpu else "cuda"
    recipe = config.algorithm.resolve().recipe
    backend = "torch" if recipe.topk else choose(config.train.backend, torch.device(device), dtype).backend
    logit: int = implementation(backend).scratch_per_logit(dtype, device)
    if recipe.own_loss:
        logit *= 3
    if backend == "reference":
        return logit * vocabulary * tokens
    scratch = int(1e6 * (config.train.max_scratch_mb or MAX_SCRATCH_MB))
    row = vocabulary * logit
    limit = scratch // row * row
    if backend == "cpp":
        limit = min(limit, CHUNK_ROWS[dtype] * row)
    return min(max(limit, row), tokens * row)


def sequence_bytes(config: Config, model: Model, length: int) -> int:
    """Keys and values of a sequence on each of an engine's GPUs, and with transformers the logits of a token."""
    logits = LOGIT_BYTES * model.vocabulary if config.rollout.engine == "transformers" else 0
    return model.cache_share(config.rollout.tensor_parallel_size) * length + logits


def engine_memory(config: Config, model: Model, cluster: Cluster) -> tuple[dict[str, int], list[str]]:
    """Parts of a rollout engine on each of its GPUs, and its problems.

    vLLM takes gpu_memory_utilization of the GPU in total: weights, working memory, and the rest for keys and values,
    which with kv_cache_memory_mb have that size. transformers: weights, and while it generates a cache of at most that
    size, or of a sequence; with share_weights no weights, but what the policy's modules take to compute, and a
    dequantized weight. A server's engine is not counted, and a run that samples nothing has no engine.
    """
    rollout = config.rollout
    if rollout.mode == "server" or not config.needs_engine:
        return {}, []
    weights = model.parameters * model.itemsize // rollout.tensor_parallel_size
    cache = (rollout.kv_cache_memory_mb or 0) * 2**20
    sequence = sequence_bytes(config, model, config.max_generation_length)
    if rollout.engine == "transformers" or cluster.cpu:
        cache = max(cache or DEFAULT_CACHE_MB * 2**20, sequence)
        if not rollout.share_weights:
            return {"engine weights": weights, "kv cache": cache}, []
        work = _work(config, model, cluster, cache)
        return {"kv cache": cache, "engine rest": work, "dequantized weights": model.dequantized}, []
    if not cache:
        cache = int(rollout.gpu_memory_utilization * cluster.gpu.memory) - weights - ENGINE_OVERHEAD
    problems = []
    if cache < sequence:
        problems.append(
            f"engine: {max(cache, 0) / GIB:.1f} GiB are left for keys and values; "
            f"a sequence of {config.max_generation_length} tokens takes {sequence / GIB:.1f} GiB"
        )
    return {"engine weights": weights, "kv cache": max(cache, 0), "engine rest": ENGINE_OVERHEAD}, problems


def _work(config: Config, model: Model, cluster: Cluster, cache: int) -> int:
    """Bytes beyond a cache that the policy's modules take at most to generate as many sequences as the cache holds.

    The cache is filled when the prompts have been read, a group's once; the first and the last group may be there in
    part. Then a layer's keys are there twice where the next token's are appended. Without evaluations, whose number of
    prompts is not known here, a rank generates no more than its share of a step.
    """
    one = sequence_bytes(config, model, config.max_generation_length)
    sequences = cache // one
    n = config.rollout.group_size - config.algorithm.resolve().demonstrates_in_place
    if evaluations := config.evaluations_read:
        n = min([n, *(part.samples for part in evaluations.values())])
    else:
        sequences = min(sequences, n * config.train.prompts_per_step // cluster.gpus * (1 + config.rollout.waiting))
    prompts = min(sequences, -(-sequences // n) + 1)
    length = config.max_generation_length - config.rollout.max_response_length
    reading = model.inference(config, prompts, length) + prompts * length * model.cache_bytes - cache
    return max(reading, model.inference(config, sequences, 1) + sequences * one // (2 * model.layers))
