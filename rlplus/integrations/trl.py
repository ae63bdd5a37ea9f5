"""TRL's trainers with the fused head, and RL-PLUS as one of them.

    from rlplus.integrations.trl import patch

    patch()  # before GRPOTrainer(...): its losses, on logprobs and entropies of the fused operation

or, with demonstrations in a column of the dataset and loss and gradient in one pass:

    from rlplus.integrations.trl import RLPlusGRPOTrainer

TRL 1.16 calls its models through `add_fused_lm_head`. Everything here rests on that function, on some methods of
GRPOTrainer and on the fields that they use; importing this module with a TRL that has others is an ImportError.
"""

import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cache, partial
from inspect import Signature, signature
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer import utils
from trl.trainer.grpo_trainer import GRPOTrainer

from rlplus.integrations import trl_loss
from rlplus.integrations.measures import MEASURES
from rlplus.integrations.transformers import FusedOutput, fuse_head
from rlplus.integrations.trl_loss import IMAGES, Batch
from rlplus.loss import Objective, policy_loss
from rlplus.loss.operations.library import IGNORED
from rlplus.loss.operations.linear_losses import Backward, backward_of

logger = logging.getLogger(__name__)

INTERFACE = {  # functions of TRL that are replaced, overridden or called, and their arguments
    "trl.trainer.utils.add_fused_lm_head": ("model", "temperature", "cast_lm_head_to_fp32", "outputs"),
    "GRPOTrainer._compute_loss": ("self", "model", "inputs"),
    "GRPOTrainer._generate_and_score_completions": ("self", "inputs"),
    "GRPOTrainer._generate_single_turn": (
        *("self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    ),
    "GRPOTrainer._get_per_token_logps_and_entropies": (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
        *("batch_size", "compute_entropy", "compute_aux_loss", *IMAGES),
    ),
    "GRPOTrainer.get_high_entropy_mask": ("self", "entropies", "mask", "threshold"),
    "GRPOTrainer.get_off_policy_mask": (
        *("advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"),
    ),
}
OUTPUT = {"loss", "log_probs", "entropy", "label_mask", "aux_loss", *MEASURES}  # fields of TRL's FusedCausalLMOutput


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


@dataclass
class _PolicyOutput(utils.FusedCausalLMOutput):
    """The output of a model that was called with `policy`: its loss is the policy loss."""

    stats: dict[str, Tensor] | None = None


_TRLS = utils.add_fused_lm_head  # the original, which no patch has


def patch(backward: Backward = "auto") -> ExitStack:
    """Let TRL's trainers compute logprobs and entropies by the fused operation, with this backward pass.

    It affects trainers that are made afterwards, those that call `add_fused_lm_head`: GRPOTrainer, RLOOTrainer,
    SFTTrainer, DPOTrainer, KTOTrainer, AsyncGRPOTrainer and subclasses. Scale and softcap of the logits are found as by
    `rlplus.head_of`, which raises ValueError for models it does not know. Undone at the exit of the returned context
    manager, or by its `close()`; there is one patch at a time, whichever call's it is. A line of the log, at INFO, says
    when a trainer first takes it. backward: see `rlplus.linear_logprob`.
    """
    backward_of(backward)  # refuses other names here, not at the trainer
    undo = ExitStack()
    undo.callback(_put_everywhere, _TRLS)
    _put_everywhere(add_fused_lm_head if backward == "auto" else partial(add_fused_lm_head, backward=backward))
    return undo


@cache
def _say_once(backward: str) -> None:
    logger.info("TRL's logprobs come from rlplus, with a backward pass that is %s", backward_of(backward))


def _put_everywhere(function: Any) -> None:
    """Into TRL's imported modules that have an `add_fused_lm_head`; those imported later get it from `utils`."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl" and "add_fused_lm_head" in vars(module):
            module.add_fused_lm_head = function  # type: ignore[attr-defined]


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    backward: Backward = "auto",
) -> None:
    """TRL's function of this name: `model(..., labels=labels, fused_lm_head=True)` returns a FusedCausalLMOutput.

    With `policy`, arguments of `rlplus.linear_policy_loss` whose tensors (B, C) belong to the last C labels, its
    loss is the policy loss, and it has stats. ValueError for other outputs than TRL's.
    """
    if not set(outputs) <= {"log_probs", "entropy", *MEASURES}:
        want = ", ".join(("log_probs", "entropy", *MEASURES))
        raise ValueError(f"want outputs among {want}; got {', '.join(outputs)}")
    # The cast is for logits in fp32, which ours are in any case, accumulated from products of bf16.
    fuse_head(model, temperature=temperature, backward=backward)
    _say_once(backward)
    model._fusion.measures = tuple(name for name in MEASURES if name in outputs)
    router_coef = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    model.forward = _Forward(model._fusion, "entropy" in outputs, router_coef)


class _Forward:
    """`forward` of a fused model with TRL's arguments, and the output that these ask for."""

    def __init__(self, fused: Any, entropy: bool, router_coef: float) -> None:
        self.fused = fused
        self.entropy = entropy
        self.router_coef = router_coef

    @property
    def __signature__(self) -> Signature:
        return signature(self.fused)

    def __call__(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        policy: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return self.fused(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        targets = shift_labels
        if targets is None:
            assert labels is not None, "want labels or shift_labels with fused_lm_head"
            targets = pad(labels[:, 1:], (0, 1), value=IGNORED)
        kept = slice(None) if shift_labels is not None else slice(-1)  # TRL leaves the last position out
        if policy is not None:
            policy = {name: trl_loss.aligned(value, targets) for name, value in policy.items()}
        out: FusedOutput = self.fused(*args, targets=targets, policy=policy, **kwargs)
        assert out.logprob is not None
        assert out.entropy is not None
        mask = (targets != IGNORED)[:, kept]
        logprob = out.logprob[:, kept]
        common = {
            "log_probs": logprob,
            "entropy": out.entropy[:, kept] if self.entropy else None,
            "label_mask": mask,
            "aux_loss": out.aux_loss,
        }
        if policy is not None:
            return _PolicyOutput(loss=out.loss, stats=out.stats, **common)
        loss = -logprob.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        if out.aux_loss is not None:
            loss = loss + self.router_coef * out.aux_loss
        measured = {name: value[:, kept] for name, value in (out.measured or {}).items()}
        return utils.FusedCausalLMOutput(loss=loss, **common, **measured)


class RLPlusGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with RL-PLUS: demonstrations in the groups, and loss and gradient in one pass of three GEMMs.

    objective: a preset's name, or an `rlplus.Objective`: the loss in the place of TRL's. beta, use_bias_correction_kl
    and entropy_coef are the GRPOConfig's, and must be the objective's where it has any. loss_type says what a token's
    loss is divided by (dapo all tokens, grpo the sequence's length, dr_grpo max_completion_length, luspo nothing), and
    importance_sampling_level, top_entropy_quantile and off_policy_mask_threshold apply to sampled tokens. With one of
    these three, logprobs are computed first: four products with the head in the place of three. None: TRL's own loss of
    sampled tokens, with all of its options and metrics, on the fused operation's logprobs, and RL-PLUS's of
    demonstrated ones.

    demonstration_column: a column of the dataset with one correct response per prompt, a text, or None for none. In
    training it replaces the last completion of its prompt's group, with an end-of-sequence token behind it: graded by
    the reward functions, a member of the group's statistics, its tokens external. The replaced completion is not
    generated, but where vLLM wants whole groups or prompts have images. A demonstration of more than
    max_completion_length tokens is left out (metric demonstrations/too_long). No demonstration is used in evaluation.

    All other arguments are GRPOTrainer's. ValueError for tools, environments and rollout_func, whose completions have
    no demonstrations; with an objective, also for use_adaptive_entropy.
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
        self.objective = trl_loss.objective_with(self.args, objective)
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
        first = self.accelerator.process_index * len(rows)
        found = dict[int, list[int]]()
        too_long = 0
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
        # vLLM's server wants whole groups, and ranks that share an engine the same number of prompts. The fields of
        # images are not all one per prompt.
        shared = self.use_vllm and (self.vllm_mode == "server" or self.args.vllm_tensor_parallel_size > 1)
        whole = shared or images is not None or bool(multimodal_fields)
        sampled = [i for i in range(len(prompt_ids)) if whole or i not in self._demonstrations] or [0]
        prompts = [prompt_ids[i] for i in sampled]
        completions, logprobs = super()._generate_single_turn(
            prompts, images, multimodal_fields, num_generations, *rest, **more
        )
        every = dict(zip(sampled, completions, strict=True)) | self._demonstrations
        scores = None
        if logprobs is not None:  # a demonstration has none: TRL takes None for a weight of 1
            known = dict(zip(sampled, logprobs, strict=True))
            scores = known | {i: [None] * len(ids) for i, ids in self._demonstrations.items()}
        rows = range(len(prompt_ids))
        return [every[i] for i in rows], None if scores is None else [scores[i] for i in rows]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"]
        external = inputs["external"][:, None]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        accumulated = self.current_gradient_accumulation_steps if self.model.training else 1
        weight = trl_loss.token_weights(self, inputs, mask) / accumulated
        batch = Batch(inputs, mask, external.expand(mask.shape), weight)
        if self.objective is None:
            return self._with_trls_loss(model, batch)
        loss, aux_loss = self._with_objective(model, batch, self.objective, accumulated)
        return loss if aux_loss is None else loss + self.router_aux_loss_coef * aux_loss / accumulated

    def _with_trls_loss(self, model: Any, batch: Batch) -> Tensor:
        """TRL's loss, in which demonstrations have an advantage of 0, and RL-PLUS's loss of the demonstrations."""
        outputs: list[Any] = []

        def kept(**arguments: Any) -> Any:
            outputs.append(model(**arguments))
            return outputs[-1]

        silent = {"advantages": batch.advantage.masked_fill(batch.external[:, :1], 0.0)}
        if batch.inputs["advantages"].ndim == 1:
            silent = {"advantages": silent["advantages"][:, 0]}
        loss: Tensor = super()._compute_loss(kept, {**batch.inputs, **silent})
        more, stats = policy_loss(
            outputs[0].log_probs[:, -batch.mask.shape[1] :],
            old_logprob=batch.inputs.get("old_per_token_logps"),
            advantage=batch.advantage.expand(batch.mask.shape),
            token_weight=batch.weight * batch.external,
            external=batch.external,
        )
        self._log_demonstrations(stats)
        return loss + more

    def _with_objective(
        self, model: Any, batch: Batch, objective: Objective, accumulated: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss without the experts' loss, and the latter. Adds the metrics."""
        inputs = batch.inputs
        sequences = self.importance_sampling_level == "sequence"
        first = sequences or self.top_entropy_quantile < 1.0 or self.off_policy_mask_threshold is not None
        outputs: list[Any] = []

        def kept(**arguments: Any) -> Any:
            if not first:
                arguments["policy"] = {"objective": objective, **trl_loss.constants(batch, objective, accumulated)}
            outputs.append(model(**arguments))
            return outputs[-1]

        logprob, entropy, aux_loss = self._get_per_token_logps_and_entropies(
            kept,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            batch.mask.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in IMAGES if name in inputs},
        )
        if first:
            self._select(batch, logprob.detach(), entropy.detach())
            loss, stats = trl_loss.two_step_loss(batch, objective, logprob, entropy, accumulated, sequences)
        else:
            loss = outputs[0].loss
            stats = outputs[0].stats
        shares = trl_loss.grpo_shares(batch, objective, logprob.detach(), entropy.detach(), sequences)
        self._record(shares, stats, objective.entropy_coef, accumulated)
        if aux_loss is not None:
            mean = self.accelerator.gather_for_metrics(aux_loss.detach()).mean().item()
            self._metrics["train" if self.model.training else "eval"]["aux_loss"].append(mean)
        return loss, aux_loss

    def _select(self, batch: Batch, logprob: Tensor, entropy: Tensor) -> None:
        """Leave sampled tokens of low entropy and sequences that are too far off the policy out, as TRL does."""
        if self.top_entropy_quantile < 1.0:
            top = self.get_high_entropy_mask(entropy, batch.mask * ~batch.external, 1 - self.top_entropy_quantile)
            batch.factor = batch.factor * (top | batch.external)
            batch.bonus = batch.bonus * (top | batch.external)
        if self.off_policy_mask_threshold is not None:
            old = batch.inputs.get("old_per_token_logps", logprob)
            near = self.get_off_policy_mask(
                advantages=batch.advantage,
                per_token_logps=logprob,
                sampling_per_token_logps=batch.inputs.get("sampling_per_token_logps", old),
                mask=batch.mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            batch.factor = torch.where(batch.external, batch.factor, batch.factor * near)

    def _record(
        self, shares: Mapping[str, Any], stats: dict[str, Tensor], entropy_coef: float, accumulated: int
    ) -> None:
        """Add GRPOTrainer's metrics, and metrics of demonstrations."""
        gather = self.accelerator.gather
        found = self._metrics["train" if self.model.training else "eval"]
        pairs = torch.stack([torch.stack([(x * on).sum(), on.sum().float()]) for x, on in shares.values()])
        sums = self.accelerator.reduce(pairs, reduction="sum").tolist()
        for name, (total, count) in zip(shares, sums, strict=True):
            found[name].append(total / max(count, 1.0))
        for name, short, pick in (("low_mean", "low_min", utils.nanmin), ("high_mean", "high_max", utils.nanmax)):
            if f"clip_ratio/{name}" in shares:
                x, on = shares[f"clip_ratio/{name}"]
                found[f"clip_ratio/{short}"].append(pick(gather((x * on).sum(-1) / on.sum(-1))).item())
        if entropy_coef:
            policy = stats["loss_internal"] + stats["loss_external"] + stats["loss_kl"]
            whole = self.loss_type in ("cispo", "dapo", "vespo")  # TRL's is then divided by the accumulation, too
            found["policy_loss"].append(gather(policy * (1 if whole else accumulated)).nanmean().item())
            if self.model.training and self.accelerator.sync_gradients:
                found["entropy_coef"].append(entropy_coef)
        self._log_demonstrations(stats)

    def _log_demonstrations(self, stats: dict[str, Tensor]) -> None:
        names = ("tokens_external", "prob_external", "ratio_external")
        count, *values = self.accelerator.reduce(torch.stack([stats[k] for k in names]), reduction="sum").tolist()
        if count:
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name, value in zip(("probability", "ratio"), values, strict=True):
                metrics[f"demonstrations/{name}"].append(value / count)
