"""A tiny model with adapters, the engine that applies them, and what it should give, in float64."""

import copy
from pathlib import Path
from typing import Any

import torch
from rollout_models import EOS, MAX_MODEL_LEN, PAD, logprobs, save, tiny_model
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rlplus.train.config import LoraConfig, RolloutConfig
from rlplus.train.learner.adapters import adapter_weights, add_adapters
from rlplus.train.rollout import Adapters, Completion, RolloutEngine, make_engine

RANK, ALPHA = 6, 10.0  # no power of two, and no rank that vLLM has room for exactly


class Adapted:
    """A model in `folder`, and adapters of it on some layers."""

    def __init__(self, folder: Path, targets: Any = "all-linear") -> None:
        self.folder, self.base = folder, tiny_model(tied=False)
        save(self.base, folder)
        self.lm = copy.deepcopy(self.base)
        add_adapters(self.lm, LoraConfig(rank=RANK, alpha=ALPHA, target_modules=targets), 0)
        shapes = {name: parameter.shape for name, (parameter,), _ in adapter_weights(self.lm)}
        self.adapters = Adapters(RANK, ALPHA, shapes)

    def change(self, seed: int) -> None:
        """Give the adapters other values, none of them 0."""
        draws = torch.Generator().manual_seed(seed)
        for name, parameter in self.lm.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=draws) * 0.15

    def weights(self) -> list[tuple[str, Tensor]]:
        return [(name, value()) for name, _, value in adapter_weights(self.lm)]

    def merged(self) -> Qwen2ForCausalLM:
        """The model with W + alpha / rank * B A in float64."""
        whole, given = copy.deepcopy(self.base).double(), dict(self.weights())
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                layer = name.removesuffix(".weight")
                if f"{layer}.lora_A.weight" in given:
                    a, b = (given[f"{layer}.lora_{which}.weight"].double() for which in "AB")
                    parameter += ALPHA / RANK * b @ a
        return whole

    def start(self, **changes: Any) -> RolloutEngine:
        options = {"engine": "vllm", "max_response_length": 16, "kv_cache_memory_mb": 16, "lora": "adapters"}
        return make_engine(
            RolloutConfig.model_validate(options | changes),
            str(self.folder),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            end_ids=[EOS],
            pad_token_id=PAD,
            seed=0,
            adapters=self.adapters,
        )

    def errors(self, prompts: list[list[int]], groups: list[list[Completion]]) -> tuple[float, float]:
        """The largest errors of an engine's logprobs and of transformers' in fp32, against float64."""
        exact, ours, theirs = self.merged(), [0.0], [0.0]
        for prompt, group in zip(prompts, groups, strict=True):
            for c in group:
                tokens = torch.tensor(c.tokens)[:, None]
                want = logprobs(exact, prompt, c.tokens, 1.0).gather(1, tokens)[:, 0]
                plain = logprobs(self.lm, prompt, c.tokens, 1.0).gather(1, tokens)[:, 0]
                ours.append(float((torch.tensor(c.logprob, dtype=torch.float64) - want).abs().max()))
                theirs.append(float((plain.double() - want).abs().max()))
        return max(ours), max(theirs)
