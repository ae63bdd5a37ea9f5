"""Rollouts with Hugging Face `generate`: no further package, slower than vLLM except on toys."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from rlplus.config import RolloutConfig
from rlplus.rollout.clock import Clock
from rlplus.rollout.protocol import DEFAULT_CACHE_MB, Completion, check_logprobs, check_request, whole_model
from rlplus.rollout.push import watched

STRETCH = 8  # tokens that are generated before sequences that have ended leave the batch


class _Draw(LogitsProcessor):
    """Draws each row's token by inversion: the first whose cumulative probability exceeds a uniform number.

    fp32 logits (B, V) -> scores (B, V) whose argmax, which `generate` takes, is that token; at temperature 0 the logits
    themselves. The probabilities are kept until the next step so that `_Recorder` can read them. Their sums are fp64:
    a token in a long tail keeps its probability. One of probability 0 adds nothing and is never the first.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.probability = torch.empty(0)

    def __call__(self, input_ids: LongTensor, scores: Any) -> Any:
        self.probability = (scores / (self.temperature or 1.0)).softmax(dim=-1)
        if not self.temperature:
            return scores
        sums = self.probability.cumsum(dim=-1, dtype=torch.float64)
        # Below the whole sum whatever that rounds to, for the number is below 1.
        bound = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
        return (sums > bound).view(torch.uint8)  # argmax takes no bool, and gives the first of equals


class _Recorder(StoppingCriteria):
    """Never stops: `generate` asks it right after a draw, when the logprob can be read and the (B, V) dropped."""

    def __init__(self, draw: _Draw, clock: Clock) -> None:
        self.draw, self.clock = draw, clock
        self.logprob: list[Tensor] = []

    def __call__(self, input_ids: LongTensor, scores: Any, **kwargs: Any) -> Any:
        self.clock.at("the next token")
        self.logprob.append(self.draw.probability.gather(1, input_ids[:, -1:]).log())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


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
        eos_token_id: int,
        pad_token_id: int,
        trust_remote_code: bool = False,
        config_path: str | None = None,
    ) -> None:
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._max_model_len = max_model_len
        self._eos, self._pad = eos_token_id, pad_token_id
        self._push_timeout_s = config.push_timeout_s
        self.clock = Clock("the generation", "rollout.progress_timeout_s", config.progress_timeout_s)
        self._failure: str | None = None
        model_config = AutoConfig.from_pretrained(config_path or model_path, trust_remote_code=trust_remote_code)
        with self._forked_rng(), whole_model(), _no_progress_bar():
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                model_path, config=model_config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
            )
        self._model.to(self._device).eval().requires_grad_(False)
        # generate() fills every setting left open from here: a penalty of the model's own would change the sampling.
        self._model.generation_config = GenerationConfig()
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self._cache_bytes = (config.kv_cache_memory_mb or DEFAULT_CACHE_MB) * 2**20
        self._bytes_per_token = _cache_bytes_per_token(model_config, self._model.dtype)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: Sequence[int],
        *,
        temperature: float,
        max_tokens: int | Sequence[int],
        seed: int,
        stop: Sequence[int] = (),
    ) -> list[list[Completion]]:
        if self._failure:
            raise RuntimeError(self._failure)
        limits = check_request(
            prompts,
            n,
            temperature=temperature,
            max_tokens=max_tokens,
            max_model_len=self._max_model_len,
            vocabulary=self._vocabulary,
            stop=stop,
        )
        stops = torch.tensor([self._eos, *stop], device=self._device)
        # Prompts of like length together: less padding.
        owners = [i for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])) for _ in range(n[i])]
        longest = max((len(prompts[i]) for i in owners), default=0) + max((limits[i] for i in owners), default=0)
        # A sequence's keys and values; of each logit the model's and its fp32 copy, and what `_Draw` makes of it.
        bytes_per_sequence = longest * self._bytes_per_token + (4 + 4 + 4 + 8 + 1) * self._vocabulary
        size = max(1, self._cache_bytes // bytes_per_sequence)
        completions: list[list[Completion]] = [[] for _ in prompts]
        with self._forked_rng(), torch.no_grad(), self.clock.running("the first token"):
            torch.manual_seed(seed)
            for start in range(0, len(owners), size):
                batch = owners[start : start + size]
                samples = self._generate_batch(
                    [prompts[i] for i in batch], [limits[i] for i in batch], temperature, stops
                )
                for owner, sample in zip(batch, samples, strict=True):
                    completions[owner].append(sample)
        return check_logprobs(completions)

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], temperature: float, stops: Tensor
    ) -> list[Completion]:
        """Generate in stretches of tokens; after each, finished sequences leave the batch."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        left = torch.tensor(limits, device=self._device)
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        rows, cache = list(range(len(prompts))), None
        while rows:
            # A state instead of keys and values (Mamba's) neither goes on where it was nor gives up rows.
            stretch = int(left.max()) if self._model._is_stateful else min(STRETCH, int(left.min()))
            output, logprob = self._generate_stretch(ids, mask, cache, stretch, temperature, stops)
            drawn = output.sequences[:, ids.shape[1] :]
            new, new_logprob = drawn.tolist(), logprob.tolist()
            for i, row in enumerate(rows):
                tokens[row] += new[i]
                logprobs[row] += new_logprob[i]
            left = left - stretch
            going = (~torch.isin(drawn, stops).any(dim=1) & (left > 0)).nonzero()[:, 0]
            cache = output.past_key_values
            if 0 < len(going) < len(rows):
                cache.batch_select_indices(going)
            ids, left = output.sequences[going], left[going]
            mask = torch.cat([mask[going], mask.new_ones(len(going), drawn.shape[1])], dim=1)
            rows = [rows[i] for i in going.tolist()]
        ends = set(stops.tolist())
        return [_cut(*row, ends) for row in zip(tokens, logprobs, limits, strict=True)]

    def _generate_stretch(
        self, ids: Tensor, mask: Tensor, cache: Any, tokens: int, temperature: float, stops: Tensor
    ) -> tuple[Any, Tensor]:
        """`generate`'s output for so many tokens after ids (B, T), and the logprobs (B, tokens or fewer) of them."""
        draw = _Draw(temperature)
        recorder = _Recorder(draw, self.clock)
        output = self._model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            generation_config=GenerationConfig(
                max_new_tokens=tokens,
                eos_token_id=stops.tolist(),
                pad_token_id=self._pad,
                use_cache=True,
                do_sample=False,  # the processor draws
                return_dict_in_generate=True,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([recorder]),
            synced_gpus=False,  # ranks generate on their own, also while the trainer's own model is in shards
        )
        return output, torch.cat(recorder.logprob, dim=1)

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

    def _forked_rng(self) -> Any:
        return torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])


def _cut(tokens: list[int], logprob: list[float], limit: int, ends: set[int]) -> Completion:
    """The response up to its stop token or its limit; later tokens were generated for others in the batch."""
    last = next((i for i, token in enumerate(tokens[:limit]) if token in ends), None)
    length = limit if last is None else last + 1
    return Completion(tokens[:length], logprob[:length], truncated=last is None)


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
