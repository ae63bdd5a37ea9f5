"""A rough time per step: the work of each phase over the hardware's peak times an assumed efficiency."""

from rlplus.tools.plan.cluster import NODE, Cluster
from rlplus.tools.plan.memory import ADAM_BYTES, Memory, head_tokens, sequence_bytes
from rlplus.tools.plan.planned_model import Model
from rlplus.train.config import Config
from rlplus.train.learner.batch import needs_statistics
from rlplus.train.learner.deepspeed_settings import deepspeed_config

GEMM_EFFICIENCY = 0.45  # share of the bf16 peak: training of dense models reaches 0.4 to 0.5 on A100. Assumed
MEMORY_EFFICIENCY = 0.6  # share of the memory's bandwidth, in decoding and in the optimizer. Assumed
LINK_EFFICIENCY = 0.7  # share of the bandwidth between GPUs, one direction. Assumed
NETWORK = 50e9  # bytes per second of each GPU between nodes, 400 Gbit/s. Assumed
PCIE = 20e9  # bytes per second to the host. Assumed
SAMPLED = 0.45  # share of the head's three GEMMs that a sampled backward pass leaves, on a CPU (decision 011)
LAUNCHES_S = 1.2e-3  # transformers' time for a layer and a token: 7.4 s for 256 tokens of 24 layers on an H200
MAX_SEQUENCES = 256  # that vLLM runs at a time: its default

ASSUMPTIONS = (
    f"{GEMM_EFFICIENCY:.0%} of the bf16 peak",
    f"{MEMORY_EFFICIENCY:.0%} of the memory bandwidth",
    f"{LINK_EFFICIENCY:.0%} of the bandwidth between GPUs",
    f"{NETWORK / 1e9:.0f} GB/s a GPU between nodes",
    f"{PCIE / 1e9:.0f} GB/s to the host",
    "every prompt and response as long as allowed",
    f"{LAUNCHES_S * 1e3:g} ms a layer for each token that transformers generates on a GPU",
    "every prompt sampled once",
    "no time for rewards and data",
)


def estimate_seconds(config: Config, model: Model, memory: Memory, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step by phase, "total" last; empty if the speed of the GPU is unknown.

    "generate" is missing if a server generates, or if the step samples nothing. With train.overlap it adds time only
    where it is longer than the training. All samples are assumed to have the maximum length, so this is an upper bound
    in that respect. cluster: the ranks and their GPUs.

    FLOP of T tokens, body of B parameters: 2 B T forward; attention 2 layers width length T (half of the square, as
    causal), the head 2 N H V (one GEMM). Backward: twice that, in the head three times with a divergence from a
    teacher; where the backward pass is sampled, the head takes SAMPLED of both. Checkpointing: the body's forward once
    more. Kaplan et al., 2020, section 2.1. Decoding is bound by memory: every step reads the weights, and the keys and
    values of all running sequences; it reads weights of 4 bits to write them dequantized, and reads those.
    """
    if (rates := _rates(cluster)) is None:
        return {}
    flops, bandwidth, link = rates
    ranks = cluster.gpus
    train = config.train

    groups = train.prompts_per_step / ranks
    prompt = config.data.max_prompt_length
    rollouts, demonstrations = _members(config)
    kinds = [
        (rollouts, prompt + config.rollout.max_response_length),
        (demonstrations, prompt + config.max_demonstration_length),
    ]
    tokens = groups * sum(count * length for count, length in kinds)
    squares = groups * sum(count * length**2 for count, length in kinds)
    forward, head = _forward_flop(model, tokens, squares)
    updates = train.prompts_per_step // (train.prompts_per_update or train.prompts_per_step)

    seconds = {}
    if rollouts and config.rollout.mode != "server":
        seconds["generate"] = _generate_seconds(config, model, memory, cluster, flops, bandwidth)
    shown = groups * demonstrations * kinds[1][1] / tokens
    algorithm = config.algorithm.resolve()
    passes = _old_passes(config, updates, shown) + bool(algorithm.objective.kl_coef)
    passes += 2 * bool(algorithm.reward_kl_coef)  # two more, on samples not yet packed for their updates
    teacher = model if algorithm.recipe.demonstration_prompt else model.teacher
    passes += bool(teacher or algorithm.recipe.teacher_server) and not algorithm.recipe.own_loss  # advantages
    seconds["old_logprob"] = passes * (forward + head) / flops
    if statistics := _statistics_passes(config, updates):
        seconds["statistics"] = statistics * (forward + head) / flops
        passes += statistics
    again = 1 if config.model.gradient_checkpointing else 0
    gemms = 4 if algorithm.recipe.own_loss else 3
    seconds["forward and backward"] = ((3 + again) * forward + gemms * _share_of_loss(config) * head) / flops
    cost = algorithm.recipe.cost
    more = groups * (rollouts + demonstrations) * (config.max_training_prompt - prompt)
    if teacher is not None:
        seconds["teacher"] = _teacher_flop(config, teacher, groups * rollouts, groups * demonstrations) / flops
    updates += cost.updates
    micro_batches = (tokens + more) / train.tokens_per_micro_batch
    seconds["communication"] = _sent_bytes(config, model, ranks, updates, micro_batches, passes) / link
    slow = PCIE if train.offload_optimizer == "cpu" else bandwidth
    seconds["optimizer"] = _optimizer_bytes(config, model, ranks, updates) / slow
    for learner in model.learners[1:]:
        work = (3 + again + cost.learner_passes) * forward
        if learner.head == "language":  # one of width 1 takes no time
            work += (gemms + cost.learner_passes) * head
        updates = cost.learner_updates or updates
        seconds["learners"] = work / flops + _optimizer_bytes(config, learner, ranks, updates) / slow
        seconds["learners"] += _sent_bytes(config, learner, ranks, updates, micro_batches, 1) / link
    if rollouts and not config.rollout.share_weights:  # otherwise there is no engine, or one for evaluations alone
        seconds["sync"] = _push_seconds(config, model, ranks, bandwidth, link) / max(1, train.overlap)
    total = sum(seconds.values())
    if train.overlap:
        generate = seconds.get("generate", 0.0)
        sync = seconds["sync"]
        total = sync + max(generate, total - generate - sync)
    return seconds | {"total": total}


def _rates(cluster: Cluster) -> tuple[float, float, float] | None:
    """FLOP, bytes of memory and bytes between GPUs per second of each rank; None if unknown."""
    gpu = cluster.gpu
    if gpu.flops is None or gpu.bandwidth is None or gpu.link is None:
        return None
    link = gpu.link * LINK_EFFICIENCY
    if cluster.gpus > NODE:
        link = min(link, NETWORK)
    return gpu.flops * GEMM_EFFICIENCY, gpu.bandwidth * MEMORY_EFFICIENCY, link


def _push_seconds(config: Config, model: Model, ranks: int, bandwidth: float, link: float) -> float:
    """Gathering the weights and handing them over to the engine: within a GPU, or through the host's memory."""
    pushed = model.pushed(config)
    handed_over = pushed / bandwidth if config.rollout.mode == "colocated" else 2 * pushed / PCIE
    gathered = _ring(pushed, ranks) / link if config.train.zero_stage == 3 else 0
    return handed_over + gathered


def _forward_flop(model: Model, tokens: float, squares: float) -> tuple[float, float]:
    """FLOP of the body's forward pass, and of a GEMM of the head. squares: sum over samples of squared lengths."""
    body = model.parameters - model.vocabulary * model.hidden * (1 if _tied(model) else 2)
    forward = 2 * body * tokens + 2 * model.layers * model.attention_width * squares
    return forward, 2 * tokens * model.hidden * model.vocabulary


def _teacher_flop(config: Config, teacher: Model, rollouts: float, demonstrations: float) -> float:
    """FLOP of a teacher's pass over these samples; its prompts may show demonstrations."""
    flop = 0.0
    for samples, length in (
        (rollouts, config.rollout.max_response_length),
        (demonstrations, config.max_demonstration_length),
    ):
        longest = config.max_training_prompt + length
        flop += sum(_forward_flop(teacher, samples * longest, samples * longest**2))
    return flop


def _old_passes(config: Config, updates: int, shown: float) -> float:
    """Forward passes for old logprobs, which stale rollouts bring with them. shown: demonstrations' share of tokens."""
    if config.train.overlap:
        return shown
    if config.stale:  # the micro-batches that have demonstrations, which are all
        return float(config.algorithm.resolve().demonstrates)
    return 1 - 1 / updates  # the first update's own pass is the old policy's


def _statistics_passes(config: Config, updates: int) -> float:
    """Forward passes for the statistics that weights and clipping need, beyond those of the updates themselves."""
    algorithm = config.algorithm.resolve()
    first = needs_statistics(algorithm, not config.stale)
    later = needs_statistics(algorithm, False)
    return (first + later * (updates - 1)) / updates + algorithm.recipe.weighs_tokens


def _share_of_loss(config: Config) -> float:
    """The share of the policy loss's GEMMs that its backward pass leaves; two of a divergence's four are for logits."""
    if config.train.backward != "sampled":
        return 1.0
    return 0.5 if config.algorithm.resolve().recipe.own_loss else SAMPLED


def _ring(size: float, ranks: int) -> float:
    """Bytes that each of R ranks sends in a ring pass over `size` bytes: (R - 1) / R of them."""
    return size * (ranks - 1) / ranks


def _sent_bytes(
    config: Config, learner: Model, ranks: int, updates: float, micro_batches: float, passes: float
) -> float:
    """Weights and gradients that each rank sends in a step. passes: forward only, over all micro-batches."""
    stage = config.train.zero_stage
    micro_batches = max(updates, micro_batches)
    settings = deepspeed_config(config, learner.trainable)
    gradient = 4 if settings["communication_data_type"] == "fp32" else learner.itemsize
    weights = learner.itemsize * (micro_batches * (2 + passes) if stage == 3 else updates)
    parameters = learner.parameters
    states = 0.0
    if learner.in_shards(config):  # hidden states in every pass, twice their gradient in fp32 in one
        parameters -= learner.vocabulary * learner.hidden
        states = learner.itemsize * micro_batches * (1 + passes) + 2 * 4 * micro_batches
        states *= ranks * head_tokens(config) * learner.hidden
    if config.algorithm.resolve().recipe.averaged_teacher:  # the average after each update; at stage 3 the policy, too
        states += learner.itemsize * learner.trainable * updates * (2 if stage == 3 else 1)
    return _ring(parameters * (weights + gradient * (updates if stage == 1 else micro_batches)) + states, ranks)


def _optimizer_bytes(config: Config, learner: Model, ranks: int, updates: float) -> float:
    """AdamW reads weight, gradient and two moments, and writes three of them; all but 8-bit moments in fp32."""
    return updates * (12 + 2 * ADAM_BYTES[config.train.optimizer]) * learner.trainable / ranks


def _generate_seconds(
    config: Config, model: Model, memory: Memory, cluster: Cluster, flops: float, bandwidth: float
) -> float:
    """Seconds to prefill each group's prompt once, then to decode in waves of as many sequences as the cache holds.

    With rollout.segment the parts of a response are sampled beside others', and each later part prefills what is there.
    """
    rollout = config.rollout
    group, _ = _members(config)
    parallel = rollout.tensor_parallel_size
    gpus = cluster.gpus * (parallel if rollout.mode == "process" else 1)  # all engines'
    sequences = config.train.prompts_per_step * group * parallel / gpus  # one engine's
    longest = config.data.max_prompt_length + rollout.max_response_length
    capacity = memory.cache // sequence_bytes(config, model, longest)
    parts = 1 + rollout.waiting
    at_once = max(1.0, min(sequences * parts, capacity, MAX_SEQUENCES))
    waves = sequences / at_once
    mean_context = config.data.max_prompt_length + rollout.max_response_length / 2
    weights = model.parameters * model.itemsize
    if rollout.share_weights:
        weights = model.weight_bytes + 2 * model.quantized * model.itemsize
    step = (weights + at_once * mean_context * model.cache_bytes) / parallel / bandwidth
    step = max(step, 2 * model.parameters * at_once / parallel / flops)
    if rollout.engine == "transformers":  # the host launches each layer's kernels; vLLM has CUDA graphs
        step = max(step, model.layers * LAUNCHES_S)
    read = config.train.prompts_per_step * config.data.max_prompt_length
    if rollout.segment:
        before = sum(config.data.max_prompt_length + part * rollout.segment for part in range(1, parts))
        read += config.train.prompts_per_step * group * before
    prefill = 2 * model.parameters * read / gpus / flops
    return prefill + waves * rollout.max_response_length * step


def _members(config: Config) -> tuple[int, int]:
    """The maximum numbers of rollouts and demonstrations in a group."""
    algorithm = config.algorithm.resolve()
    rollouts = config.rollout.group_size - algorithm.demonstrates_in_place if algorithm.generates else 0
    return rollouts, int(algorithm.needs_demonstrations and algorithm.recipe.cost.own_demonstrations)


def _tied(model: Model) -> bool:
    return model.lm.get_input_embeddings().weight is model.lm.get_output_embeddings().weight
