"""A stand-in for TRL 1.16 with the part of its interface that `rlplus.integrations.trl` uses.

tests/peers/test_peers_trl.py compares its signatures with TRL's.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import stub_modules
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass
class FusedCausalLMOutput:
    loss: Any = None
    log_probs: Any = None
    entropy: Any = None
    log_sum_sq_probs: Any = None
    mean_logits: Any = None
    is_top1: Any = None
    label_mask: Any = None
    aux_loss: Any = None


def add_fused_lm_head(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: tuple[str, ...] = ("log_probs",)
) -> None:
    model.given_trls_head = True


def nanmin(tensor: Tensor) -> Tensor:
    return tensor[~tensor.isnan()].min()


def nanmax(tensor: Tensor) -> Tensor:
    return tensor[~tensor.isnan()].max()


class Accelerator:
    num_processes, process_index, device, sync_gradients = 1, 0, torch.device("cpu"), True

    def autocast(self) -> Any:
        return torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad()

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value

    def gather(self, value: Tensor) -> Tensor:
        return value


class GRPOTrainer:
    """Completions are one letter and an end token; rewards are the letters' ids."""

    def __init__(self, model: Any, args: Any, processing_class: Any) -> None:
        self.model, self.args, self._tokenizer = model, args, processing_class
        self.accelerator, self._metrics = Accelerator(), {mode: defaultdict(list) for mode in ("train", "eval")}
        self.num_generations, self.max_completion_length, self.loss_type = 4, 6, args.loss_type
        self.use_vllm, self.aux_loss_enabled, self.current_gradient_accumulation_steps = False, False, 1
        self.importance_sampling_level, self.top_entropy_quantile = args.importance_sampling_level, 1.0
        self.off_policy_mask_threshold = None
        home: Any = sys.modules["trl.trainer.grpo_trainer"]
        home.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
        self.asked = 0

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> Any:
        self.asked += len(prompt_ids)
        return [[65 + i, 257] for i in range(len(prompt_ids))], None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        prompts = [torch.tensor([*row["prompt"].encode()]) for row in inputs]
        completions, _ = self._generate_single_turn([p.tolist() for p in prompts], None, {}, self.num_generations)
        masks = [torch.ones(len(ids), dtype=torch.int64) for ids in completions]
        rewards = torch.tensor([float(ids[0]) for ids in completions]).view(-1, self.num_generations)
        return {
            "prompt_ids": torch.stack(prompts),
            "prompt_mask": torch.ones_like(torch.stack(prompts)),
            "completion_ids": pad_sequence([torch.tensor(x) for x in completions], batch_first=True, padding_value=256),
            "completion_mask": pad_sequence(masks, batch_first=True),
            "advantages": (rewards - rewards.mean(1, keepdim=True)).flatten(),
            "num_items_in_batch": torch.tensor(sum(len(ids) for ids in completions)),
        }

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None,
        compute_entropy: bool = False, compute_aux_loss: bool = False, pixel_values: Any = None,
        image_grid_thw: Any = None, num_images: Any = None, pixel_attention_mask: Any = None,
        spatial_shapes: Any = None, num_tiles: Any = None, image_sizes: Any = None, token_type_ids: Any = None,
        mm_token_type_ids: Any = None, image_position_ids: Any = None,
    ) -> Any:  # fmt: skip
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        out = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
        return out.log_probs[:, -logits_to_keep:], out.entropy[:, -logits_to_keep:], None

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def get_off_policy_mask(
        advantages: Any, per_token_logps: Any, sampling_per_token_logps: Any, mask: Any, off_policy_threshold: float
    ) -> Tensor:
        raise NotImplementedError

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """Advantages times logprobs, a mean over all tokens."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        count = inputs["completion_ids"].shape[1]
        logprob, entropy, _ = self._get_per_token_logps_and_entropies(model, ids, mask, count, compute_entropy=True)
        self._metrics["train"]["entropy"].append(entropy.mean().item())
        loss: Tensor = -(inputs["advantages"][:, None] * logprob).sum() / inputs["completion_mask"].sum()
        return loss


def config(**changes: Any) -> SimpleNamespace:
    """The part of a GRPOConfig that is read."""
    return SimpleNamespace(
        **{
            **{"loss_type": "dapo", "beta": 0.0, "entropy_coef": 0.0, "use_bias_correction_kl": False, "delta": None},
            **{"importance_sampling_level": "token", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None},
            **{"use_adaptive_entropy": False, "epsilon": 0.2, "epsilon_high": None, "steps_per_generation": 1},
            **{"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vllm_tensor_parallel_size": 1},
            **changes,
        }
    )


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make the stub importable as `trl`, and `rlplus.integrations.trl` not yet imported; returns its modules."""
    head = {"add_fused_lm_head": add_fused_lm_head}
    contents: dict[str, dict[str, Any]] = {
        "trl": {"__version__": "1.16.0"},
        "trl.trainer.utils": head | {"FusedCausalLMOutput": FusedCausalLMOutput, "nanmin": nanmin, "nanmax": nanmax},
        "trl.trainer.grpo_trainer": head | {"GRPOTrainer": type("GRPOTrainer", (GRPOTrainer,), {})},
        "trl.trainer.rloo_trainer": head,
        "trl.trainer.sft_trainer": head,
    }
    return stub_modules.install(monkeypatch, contents, "rlplus.integrations.trl")
