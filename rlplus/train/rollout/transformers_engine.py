"""Rollouts with Hugging Face `generate`: no further package, slower than vLLM except on toys."""

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from rlplus.common import activity
from rlplus.common.kept_sets import KeptSets
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.expert_routing import Recorder
from rlplus.train.rollout.protocol import (
    DEFAULT_CACHE_MB,
    LOGIT_BYTES,
    Completion,
    Request,
    Sampling,
    check_requests,
    check_responses,
    whole_model,
)
from rlplus.train.rollout.push import Clock, watched

BLOCK = 256  # probabilities that are added up before one of them is looked for
ATTENTION = "rlplus_sdpa"  # the name of ours in transformers


def draw(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token of each row of logits (B, V) fp32 and its logprob: (B,) each. At temperature 0 the likeliest token.

    By inversion: the first whose cumulative probability exceeds a uniform number. The sums are fp64: a token in a long
    tail keeps its probability. One of probability 0 adds nothing and is never the first.
    """
    probability = (logits / (temperature or 1.0)).softmax(dim=-1)
    token = _invert(probability) if temperature else logits.argmax(dim=-1, keepdim=True)
    return token[:, 0], probability.gather(1, token)[:, 0].log()


def draw_kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A token of each row of logits (B, V) fp32 among those kept, and its logprob among them: (B,) each.

    Also tokens (B, k) int32, likeliest first, and counts (B,): the first ones of each row were kept. As in vLLM the
    logits are divided by the temperature first; then min_p compares with the likeliest token, top_k counts, and top_p
    adds up what these two have left. Among equal logits top_k keeps k in all.
    """
    z, order = (logits / sampling.temperature).topk(min(sampling.top_k, logits.shape[1]))
    z = z.double()
    kept = z > -math.inf
    if sampling.min_p:
        kept &= z >= z[:, :1] + math.log(sampling.min_p)
    if sampling.top_p < 1:
        probability = z.masked_fill(~kept, -math.inf).softmax(dim=-1)
        kept &= F.pad(probability.cumsum(dim=-1), (1, -1)) < sampling.top_p  # the likelier ones' share
    logprob = z.masked_fill(~kept, -math.inf).log_softmax(dim=-1)
    likelier = logprob.exp().cumsum(dim=-1)
    whole = likelier[:, -1:]
    place = _first_above(likelier, torch.rand(len(z), 1, dtype=torch.float64, device=z.device) * whole)
    token = order.gather(1, place)[:, 0]
    drawn = logprob.gather(1, place)[:, 0]
    return token, drawn.float(), order.int(), kept.sum(dim=-1)


def _invert(probability: Tensor) -> Tensor:
    """(B, V) -> (B, 1): the block of tokens in which the sum first exceeds the bound, then the token in it."""
    blocks = F.pad(probability, (0, -probability.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # The bound is below the whole sum however that is rounded, since the number is below 1.
    bound = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    block = _first_above(sums, bound)
    bound = bound - F.pad(sums, (1, 0)).gather(1, block)
    inner = blocks.take_along_dim(block[:, :, None], 1)[:, 0].cumsum(dim=-1, dtype=torch.float64)
    # Keep it below the block's sum as added up here, which may be rounded otherwise.
    bound = bound.minimum(inner[:, -1:].nextafter(torch.zeros_like(bound)))
    return (block * BLOCK + _first_above(inner, bound)).clamp(max=probability.shape[1] - 1)


def _first_above(sums: Tensor, bound: Tensor) -> Tensor:
    """The place (B, 1) where ascending sums (B, K) first exceed bound (B, 1); the last one if they are NaN."""
    return torch.searchsorted(sums, bound, right=True).clamp(max=sums.shape[1] - 1)


class TransformersEngine:
    """A separate copy of the model, on the current CUDA device if there is one, else on the CPU."""

    name = "transformers"

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int,
        end_ids: Sequence[int],
        pad_token_id: int,
        trust_remote_code: bool = False,
        config_path: str | None = None,
        **_: Any,  # other engines' arguments
    ) -> None:
        model_config = AutoConfig.from_pretrained(config_path or model_path, trust_remote_code=trust_remote_code)
        with _forked_rng(), whole_model(), _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                model_path, config=model_config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
            )
        model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
        self._begin(config, model, max_model_len, end_ids, pad_token_id)

    def _begin(
        self, config: RolloutConfig, model: Any, max_model_len: int, end_ids: Sequence[int], pad_token_id: int
    ) -> None:
        self._model = model.eval()
        self._device = model.device
        self._max_model_len = max_model_len
        self._ends = end_ids
        self._pad = pad_token_id
        self._push_timeout_s = config.push_timeout_s
        self.clock = Clock("the generation", "rollout.progress_timeout_s", config.progress_timeout_s)
        self._failure: str | None = None
        _attend_without_copies(self._model)
        if config.head_dtype == "float32" and model.dtype != torch.float32:
            _multiply_in_fp32(self._model.get_output_embeddings())
        # generate() fills every setting left open from here: a penalty of the model's own would change the sampling.
        self._model.generation_config = GenerationConfig()
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self._cache_bytes = (config.kv_cache_memory_mb or DEFAULT_CACHE_MB) * 2**20
        self._bytes_per_token = _cache_bytes_per_token(model.config, self._model.dtype)
        self._recorder = Recorder(self._model) if config.routing_replay else None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        if self._failure:
            raise RuntimeError(self._failure)
        check_requests(requests, sampling, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        # Prompts of like length together: less padding.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        owners = [i for i in order for _ in range(requests[i].n)]
        asked = [request for request in requests if request.n]
        longest = max((len(r.prompt) for r in asked), default=0) + max((r.max_tokens for r in asked), default=0)
        bytes_per_sequence = longest * self._bytes_per_token + LOGIT_BYTES * self._vocabulary
        size = max(1, self._cache_bytes // bytes_per_sequence)
        completions: list[list[Completion]] = [[] for _ in requests]
        activity.rollouts.begin(len(owners))
        with _forked_rng(), torch.no_grad(), self.clock.running("the first token"):
            torch.manual_seed(sampling.seed)
            for start in range(0, len(owners), size):
                batch = owners[start : start + size]
                samples = self._generate_batch([requests[i] for i in batch], sampling)
                for owner, sample in zip(batch, samples, strict=True):
                    completions[owner].append(sample)
        return check_responses(
            completions, requests, sampling, vocabulary=self._vocabulary, ends=self._ends, engine=self.name
        )

    def _listening(self, sampling: Sampling, prompts: list[Sequence[int]]) -> AbstractContextManager[Recorder | None]:
        """Gives the recorder of sequences behind these prompts, if their experts are asked for."""
        if not sampling.experts:
            return nullcontext()
        if self._recorder is None:
            raise ValueError("want an engine that was made with rollout.routing_replay for its experts")
        return self._recorder.listening([*map(len, prompts)])

    def _generate_batch(self, batch: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """A response to each request. Equal prompts are processed once."""
        prompts = [request.prompt for request in batch]
        limits = [request.max_tokens for request in batch]
        keys: list[Any] = [tuple(prompt) for prompt in prompts]
        if self._model._is_stateful:  # a state instead of keys and values (Mamba's) cannot be copied to other rows
            keys = list(range(len(prompts)))
        distinct = dict(zip(keys, prompts, strict=True))
        place = {key: i for i, key in enumerate(distinct)}
        width = max(map(len, prompts))
        ids = [[self._pad] * (width - len(p)) + list(p) for p in distinct.values()]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in distinct.values()]
        copies = [place[key] for key in keys]
        with self._listening(sampling, prompts) as recorder:
            completions: list[Completion] = self._model.generate(
                torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                generation_config=GenerationConfig(max_new_tokens=max(limits), pad_token_id=self._pad, use_cache=True),
                custom_generate=partial(
                    self._decode, copies=copies, limits=limits, sampling=sampling, recorder=recorder
                ),
            )
        return completions

    def _decode(
        self,
        model: Any,
        ids: Tensor,
        *,
        copies: list[int],
        limits: Sequence[int],
        sampling: Sampling,
        recorder: Recorder | None,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> list[Completion]:
        """The loop of `generate`, which calls it: a completion of each of `copies`, rows of the prompts ids (P, T).

        A sequence that has ended leaves the batch.
        """
        stops = [*self._ends, *sampling.stop]
        tokens: list[list[int]] = [[] for _ in copies]
        logprobs: list[list[float]] = [[] for _ in copies]
        kept = [KeptSets() for _ in copies]
        rows = list(range(len(copies)))  # places in the batch
        live = set(rows)  # those that have not ended
        logits = _forward(model, ids, None, inputs)
        if recorder is not None:
            recorder.begin(len(ids), copies)
        if copies != rows:
            ids = ids[copies]
            logits = logits[copies]
            _select(copies, inputs, ids.device)
        while True:
            if sampling.top_k:
                token, logprob, order, count = draw_kept(logits, sampling)
                choices = order.cpu().numpy()
                counts = count.cpu().numpy()
            else:
                token, logprob = draw(logits, sampling.temperature)
            before = len(live)
            for i, (row, new, new_logprob) in enumerate(zip(rows, token.tolist(), logprob.tolist(), strict=True)):
                if row in live:
                    tokens[row].append(new)
                    logprobs[row].append(new_logprob)
                    if sampling.top_k:
                        kept[row].add(choices[i, : counts[i]].tobytes())
                    if new in stops or len(tokens[row]) == limits[row]:
                        live.remove(row)
            activity.rollouts.add(before - len(live), before)
            self.clock.at("the next token")
            if not live:
                experts = [recorder.taken(row, len(t)) if recorder else None for row, t in enumerate(tokens)]
                return [
                    Completion(t, p, t[-1] not in stops, kept=each if sampling.top_k else None, experts=chosen)
                    for t, p, each, chosen in zip(tokens, logprobs, kept, experts, strict=True)
                ]
            ids = torch.cat([ids, token[:, None]], dim=1)
            if len(live) < len(rows) and not model._is_stateful:
                going = [i for i, row in enumerate(rows) if row in live]
                ids = ids[going]
                rows = [rows[i] for i in going]
                _select(going, inputs, ids.device)
            logits = _forward(model, ids, 1, inputs)
            if recorder is not None:
                recorder.add(rows)

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._model is None:
            raise RuntimeError(self._failure)
        parameters = dict(self._model.named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._failure = f"the push of version {version} failed half-way: push a whole model before generating"
        with torch.no_grad(), watched(weights, shapes, version=version, timeout_s=self._push_timeout_s) as checked:
            for name, weight in checked:
                parameters[name].copy_(weight)
        self._failure = None

    def sleep(self) -> None:
        """A no-op: rollout.sleep is refused with this engine."""

    def close(self) -> None:
        self._failure = "the engine is closed"
        self._model = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _forked_rng() -> Any:
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _forward(model: Any, ids: Tensor, last: int | None, inputs: dict[str, Any]) -> Tensor:
    """fp32 logits (B, V) after ids (B, T), whose `last` tokens are not in the cache; None: none is. Updates inputs."""
    arguments = model.prepare_inputs_for_generation(
        ids, next_sequence_length=last, is_first_iteration=last is None, **inputs
    )
    outputs = model(**arguments, return_dict=True)
    inputs.update(model._update_model_kwargs_for_generation(outputs, inputs))
    logits: Tensor = outputs.logits[:, -1].float()
    return logits


def _multiply_in_fp32(head: Any) -> None:
    """Have the model's head return fp32 logits, which its half-precision product would round; ValueError for a head
    that is no plain linear layer."""
    if (kind := type(head)) is not nn.Linear:
        found = kind.__name__
        raise ValueError(f"rollout.head_dtype float32 wants a model whose head is nn.Linear; got {found}: want model")
    head.forward = partial(_fp32_logits, head)


def _fp32_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """(..., H) in half precision -> (..., V) in fp32."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if hidden.is_cuda:
        product = torch.mm(rows, head.weight.T, out_dtype=torch.float32)
    else:
        product = rows.float() @ head.weight.float().T
    if head.bias is not None:
        product += head.bias.float()
    return product.view(*hidden.shape[:-1], head.out_features)


def _select(rows: list[int], inputs: dict[str, Any], device: torch.device) -> None:
    """Keep these rows of the cache, or copies of them, and of what else has a row per sequence."""
    index = torch.tensor(rows, device=device)
    inputs["past_key_values"].batch_select_indices(index)
    for name in ("attention_mask", "position_ids"):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name].index_select(-2, index)


def _cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes in all layers together."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * width * dtype.itemsize


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' `sdpa` without its copies of shared keys and values, one per query head, under a mask.

    query (B, H, T, D), key and value (B, K, S, D), attention_mask (B or 1, H or 1, T, S) -> (B, T, H, D). For T = 1 the
    H / K query heads that share keys are passed as so many queries of one head: (B, K, H / K, D).
    """
    shared = getattr(module, "num_key_value_groups", 1)
    one_mask = attention_mask is not None and attention_mask.shape[1] == 1  # all heads share it
    if shared == 1 or query.shape[2] > 1 or not one_mask or options.get("position_bias") is not None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return whole
    queries = query.squeeze(2).unflatten(1, (-1, shared))
    out, _ = sdpa_attention_forward(None, queries, key, value, attention_mask, **options)
    return out.transpose(1, 2).flatten(1, 2).unsqueeze(1), None


def _attend_without_copies(model: Any) -> None:
    """Replace transformers' `sdpa` by `attend` in this model, if it uses that."""
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(ATTENTION)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
