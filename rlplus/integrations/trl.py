"""TRL's trainers with the fused head, and RL-PLUS as one of them.

    from rlplus.integrations.trl import patch

    patch()  # before GRPOTrainer(...): its losses, on logprobs and entropies of the fused operation

or, with demonstrations in a column of the dataset and loss and gradient in one pass:

    from rlplus.integrations.trl import RLPlusGRPOTrainer

TRL 1.16 calls its models through `add_fused_lm_head`. Everything here rests on that function, on three methods of
GRPOTrainer and on the fields that they use; importing this module with a TRL that has others is an ImportError.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer import grpo_trainer, rloo_trainer, utils
from trl.trainer.grpo_trainer import GRPOTrainer

from rlplus.integrations.transformers import FusedOutput, fuse_head
from rlplus.objective import Objective
from rlplus.ops.library import IGNORED

INTERFACE = {  # functions of TRL that are replaced, overridden or called, and their arguments
    "trl.trainer.utils.add_fused_lm_head": ("model", "temperature", "cast_lm_head_to_fp32", "outputs"),
    "GRPOTrainer._compute_loss": ("self", "model", "inputs"),
    "GRPOTrainer._generate_and_score_completions": ("self", "inputs"),
    "GRPOTrainer._generate_single_turn": (
        *("self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    ),
}
OUTPUT = {"loss", "log_probs", "entropy", "label_mask", "aux_loss"}  # fields of TRL's FusedCausalLMOutput


def _check_interface() -> None:
    """ImportError unless TRL is as this module expects it."""
    homes = {"trl.trainer.utils": utils, "GRPOTrainer": GRPOTrainer}
    for path, want in INTERFACE.items():
        home, _, name = path.rpartition(".")
        function = getattr(homes[home], name, None)
        got = None if function is None else tuple(signature(function).parameters)
        if got != want:
            found = "there is none" if got is None else f"it takes ({', '.join(got)})"
            raise ImportError(
                f"want TRL 1.16, whose {path} takes ({', '.join(want)}); got TRL {trl.__version__}, where {found}"
            )
    output = getattr(utils, "FusedCausalLMOutput", None)
    if output is None or not {field.name for field in fields(output)} >= OUTPUT:
        names = ", ".join(sorted(OUTPUT))
        raise ImportError(f"want TRL 1.16, whose FusedCausalLMOutput has {names}; got TRL {trl.__version__}")


_check_interface()


def patch() -> ExitStack:
    """Let GRPOTrainer, RLOOTrainer and subclasses of them compute logprobs and entropies by the fused operation.

    It affects trainers that are made afterwards: their losses of every loss_type, old and reference logprobs and the
    entropy metric. Scale and softcap of the logits are found as by `rlplus.head_of`, which raises ValueError for models
    it does not know. Undone at the exit of the returned context manager, or by its `close()`.
    """
    undo = ExitStack()
    for module in (grpo_trainer, rloo_trainer):
        undo.callback(setattr, module, "add_fused_lm_head", module.add_fused_lm_head)
        module.add_fused_lm_head = add_fused_lm_head
    return undo


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """TRL's function of this name: `model(..., labels=labels, fused_lm_head=True)` returns a FusedCausalLMOutput.

    outputs: "log_probs" and "entropy" only; ValueError for another.
    """
    if not set(outputs) <= {"log_probs", "entropy"}:
        raise ValueError(f"want outputs among log_probs and entropy; got {', '.join(outputs)}")
    fuse_head(model, temperature=temperature, dtype=torch.float32 if cast_lm_head_to_fp32 else None)
    fused = model.forward
    router_coef = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)

    @wraps(fused)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return fused(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        targets = shift_labels
        if targets is None:
            assert labels is not None, "want labels or shift_labels with fused_lm_head"
            targets = pad(labels[:, 1:], (0, 1), value=IGNORED)
        out: FusedOutput = fused(*args, targets=targets, **kwargs)
        kept = slice(None) if shift_labels is not None else slice(-1)  # TRL leaves the last position out
        mask = (targets != IGNORED)[:, kept]
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        assert out.logprob is not None
        assert out.entropy is not None
        logprob = out.logprob[:, kept]
        loss = -logprob.sum() / count
        return utils.FusedCausalLMOutput(
            loss=loss if out.aux_loss is None else loss + router_coef * out.aux_loss,
            log_probs=logprob,
            entropy=out.entropy[:, kept] if "entropy" in outputs else None,
            label_mask=mask,
            aux_loss=out.aux_loss,
        )

    model.forward = MethodType(forward, model)


class RLPlusGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with RL-PLUS: demonstrations in the groups, and loss and gradient in one pass of three GEMMs.

    objective: of `rlplus.Objective`, or a preset's name. None takes the surrogate of sampled tokens from the
    GRPOConfig: that of its loss_type, with epsilon, delta and the temperatures of sapo. beta, use_bias_correction_kl
    and entropy_coef are the GRPOConfig's in any case, and its loss_type says what a token's loss is divided by: dapo
    all tokens, grpo the sequence's length, dr_grpo max_completion_length, luspo nothing.

    demonstration_column: a column of the dataset with one correct response per prompt, a text, or None for none. In
    training it replaces the last completion of its prompt's group, with an end-of-sequence token behind it: graded by
    the reward functions, a member of the group's statistics, its tokens external. The replaced completion is not
    generated, but where vLLM wants whole groups. A demonstration of more than max_completion_length tokens is left out
    (metric demonstrations/too_long). No demonstration is used in evaluation.

    All other arguments are GRPOTrainer's. ValueError for what this loss does not have: tools, images, environments,
    rollout_func, importance_sampling_level "sequence", top_entropy_quantile, off_policy_mask_threshold and
    use_adaptive_entropy; without an objective, also loss_type vespo.
    """

    def __init__(
        self,
        *args: Any,
        objective: str | Objective | None = "rlplus",
        demonstration_column: str = "demonstration",
        **kwargs: Any,
    ) -> None:
        for name in ("tools", "rollout_func", "environment_factory"):
            if kwargs.get(name):
                raise ValueError(f"want no {name}: its completions have no demonstrations; got one")
        with patch():
            super().__init__(*args, **kwargs)
        self.objective = _objective(self.args, objective)
        self.demonstration_column = demonstration_column
        self._demonstrations: dict[int, list[int]] = {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._demonstrations = self._demonstrations_of(inputs) if self.model.training else {}
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        external = [row in self._demonstrations for row in range(len(inputs))]
        out["external"] = torch.tensor(external, device=out["completion_ids"].device)
        return out

    def _demonstrations_of(self, rows: list[dict[str, Any]]) -> dict[int, list[int]]:
        """Token ids of the demonstrations that replace this process's completions, by row."""
        first, found, too_long = self.accelerator.process_index * len(rows), dict[int, list[int]](), 0
        for i, row in enumerate(rows):
            text = row.get(self.demonstration_column)
            if text is None or (first + i + 1) % self.num_generations:
                continue
            if not isinstance(text, str):
                raise ValueError(f"want column {self.demonstration_column} a text or None; got {type(text).__name__}")
            ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
            if len(ids) <= self.max_completion_length:
                found[i] = ids
            else:
                too_long += 1
        counts = torch.tensor([len(found), too_long, len(rows)], device=self.accelerator.device)
        used, left_out, completions = self.accelerator.reduce(counts, reduction="sum").tolist()
        self._metrics["train"]["demonstrations/share"].append(used / completions)
        self._metrics["train"]["demonstrations/too_long"].append(left_out)
        return found

    def _generate_single_turn(
        self, prompt_ids: list[Any], images: Any, multimodal_fields: Any, num_generations: int, *rest: Any, **more: Any
    ) -> tuple[list[list[int]], list[Any] | None]:
        if images is not None:
            raise ValueError("want prompts without images: the loss passes none to the model; got some")
        # vLLM's server wants whole groups, and ranks that share an engine the same number of prompts.
        whole = self.use_vllm and (self.vllm_mode == "server" or self.args.vllm_tensor_parallel_size > 1)
        sampled = [i for i in range(len(prompt_ids)) if whole or i not in self._demonstrations] or [0]
        prompts = [prompt_ids[i] for i in sampled]
        completions, logprobs = super()._generate_single_turn(prompts, None, {}, num_generations, *rest, **more)
        every = dict(zip(sampled, completions, strict=True)) | self._demonstrations
        scores = None
        if logprobs is not None:  # a demonstration has none: TRL takes None for a weight of 1
            known = dict(zip(sampled, logprobs, strict=True))
            scores = known | {i: [None] * len(ids) for i, ids in self._demonstrations.items()}
        rows = range(len(prompt_ids))
        return [every[i] for i in rows], None if scores is None else [scores[i] for i in rows]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        prompt, completion, mask = inputs["prompt_ids"], inputs["completion_ids"], inputs["completion_mask"]
        counted = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        # A state predicts the token after it: the states that predict the completion begin one before it.
        align = partial(pad, pad=(prompt.shape[1] - 1, 1))
        accumulated = self.current_gradient_accumulation_steps if self.model.training else 1
        policy = {"objective": self.objective} | {
            name: None if value is None else align(value)
            for name, value in self._constants(inputs, counted, accumulated).items()
        }
        with self.accelerator.autocast():
            out: FusedOutput = model(
                input_ids=torch.cat([prompt, completion], 1),
                attention_mask=torch.cat([inputs["prompt_mask"], mask], 1),
                targets=align(completion.masked_fill(counted == 0, IGNORED), value=IGNORED),
                policy=policy,
                **({"output_router_logits": True} if self.aux_loss_enabled else {}),
            )
        self._record(out, policy)
        assert out.loss is not None
        if self.aux_loss_enabled:
            assert out.aux_loss is not None
            return out.loss + self.router_aux_loss_coef * out.aux_loss / accumulated
        return out.loss

    def _constants(self, inputs: dict[str, Any], mask: Tensor, accumulated: int) -> dict[str, Tensor | None]:
        """Per-token inputs of the policy loss (B, C)."""
        advantage = inputs["advantages"] if inputs["advantages"].ndim == 2 else inputs["advantages"][:, None]
        if "importance_sampling_ratio" in inputs:  # a factor >= 0 of the surrogates, as the size of the advantage is
            advantage = advantage * inputs["importance_sampling_ratio"]
        entropy_weight = mask / (mask.sum().clamp(min=1.0) * accumulated) if self.objective.entropy_coef else None
        return {
            "advantage": advantage.expand(mask.shape),
            "token_weight": self._weights(inputs, mask) / accumulated,
            "external": inputs["external"][:, None].expand(mask.shape),
            "old_logprob": inputs.get("old_per_token_logps"),
            "ref_logprob": inputs.get("ref_per_token_logps"),
            "entropy_weight": entropy_weight,
        }

    def _weights(self, inputs: dict[str, Any], mask: Tensor) -> Tensor:
        """Factor of each token's loss under loss_type, before gradients are accumulated; (B, C)."""
        if self.loss_type in ("grpo", "sapo"):
            return mask / (mask.sum(-1, keepdim=True).clamp(min=1.0) * len(mask))
        if self.loss_type == "bnpo":
            return mask / mask.sum().clamp(min=1.0)
        if self.loss_type == "dr_grpo":
            return mask / (len(mask) * self.max_completion_length)
        if self.loss_type == "luspo":
            return mask / len(mask)
        # The tokens of all processes and of all steps of a generation, of which this is one.
        steps = self.args.steps_per_generation if self.model.training else 1
        return mask * self.accelerator.num_processes * steps / inputs["num_items_in_batch"].clamp(min=1.0)

    def _record(self, out: FusedOutput, policy: Mapping[str, Any]) -> None:
        """Add the metrics that GRPOTrainer has, and those of demonstrations."""
        assert out.stats is not None
        assert out.logprob is not None
        stats = dict(out.stats)
        if self.objective.kl_coef:
            gap = policy["ref_logprob"] - out.logprob
            kl = torch.expm1(gap) - gap
            if self.objective.kl_estimator == "k3-unbiased" and policy["old_logprob"] is not None:
                kl = kl * (out.logprob - policy["old_logprob"]).exp()
            stats["kl"] = torch.where(policy["token_weight"] != 0, kl, 0.0).sum()
        sums = self.accelerator.reduce(torch.stack(list(stats.values())), reduction="sum").tolist()
        s = dict(zip(stats, sums, strict=True))
        everything, sampled, external = (max(s[f"tokens{of}"], 1.0) for of in ("", "_internal", "_external"))
        found = {"entropy": s["entropy"] / everything}
        if "kl" in s:
            found["kl"] = s["kl"] / everything
        if self.objective.internal == "clip":
            low, high = s["clipped_low"] / sampled, s["clipped_high"] / sampled
            found |= {f"clip_ratio/{k}_mean": v for k, v in (("low", low), ("high", high), ("region", low + high))}
        if s["tokens_external"]:
            found["demonstrations/probability"] = s["prob_external"] / external
            found["demonstrations/ratio"] = s["ratio_external"] / external
        for name, value in found.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)


def _objective(args: Any, objective: str | Objective | None) -> Objective:
    """The objective that was asked for, or that of the GRPOConfig, with the latter's coefficients."""
    neutral = {"importance_sampling_level": "token", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
    for name, value in (neutral | {"use_adaptive_entropy": False}).items():
        if getattr(args, name) != value:
            raise ValueError(f"want {name} {value!r} in RLPlusGRPOTrainer; got {getattr(args, name)!r}")
    chosen = Objective.preset(objective) if isinstance(objective, str) else objective or _surrogate(args)
    for name, key in (("kl_coef", "beta"), ("entropy_coef", "entropy_coef")):
        want, got = getattr(chosen, name), getattr(args, key)
        if want not in (0.0, got):
            raise ValueError(f"want {key}={want} in the GRPOConfig, as the objective has it; got {got}")
    if chosen.mismatch_cap is not None:
        raise ValueError("want mismatch_cap None: the GRPOConfig has vllm_importance_sampling_correction for it")
    estimator = "k3-unbiased" if args.use_bias_correction_kl else "k3"
    return replace(chosen, kl_coef=args.beta, entropy_coef=args.entropy_coef, kl_estimator=estimator)


def _surrogate(args: Any) -> Objective:
    """The surrogate of a loss_type."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":  # whose epsilon_high is the largest weight itself
        return Objective(internal="cispo", clip_high=high - 1)
    if args.loss_type == "sapo":
        return Objective(internal="sapo", tau_pos=args.sapo_temperature_pos, tau_neg=args.sapo_temperature_neg)
    if args.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        raise ValueError(
            f"want an objective with loss_type {args.loss_type}, whose surrogate this trainer lacks; got None"
        )
    if args.delta is not None and args.delta < 1 + high:
        raise ValueError(f"want delta at least 1 + epsilon_high = {1 + high}; got {args.delta}")
    return Objective(internal="clip", clip_low=args.epsilon, clip_high=high, dual_clip=args.delta)
