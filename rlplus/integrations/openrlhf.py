"""OpenRLHF 0.11.2 with the fused head. A script in the place of `openrlhf.cli.train_ppo_ray`, with the same arguments:

    import runpy
    from rlplus.integrations.openrlhf import patch

    patch()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")

OpenRLHF's losses stay as they are. Its actors, the policy and the reference model, return the logprobs and entropies
that these take without computing logits; prompts and padding stay out of the head.
"""

import sys
from functools import partial
from importlib.metadata import version
from typing import Any

from openrlhf.models import Actor
from openrlhf.models.actor import gather_and_pad_tensor, unpad_and_slice_tensor
from torch import Tensor

from rlplus.integrations.interface import check_interface
from rlplus.integrations.transformers import FusedOutput, fuse_head
from rlplus.loss.operations.library import IGNORED

INTERFACE = {  # functions of OpenRLHF that are overridden or called, and their arguments
    Actor.forward: (
        *("self", "sequences", "action_mask", "attention_mask", "return_output", "allgather_logits"),
        *("return_logprobs", "ring_attn_group", "packed_seq_lens", "return_entropy", "mm_inputs"),
    ),
    unpad_and_slice_tensor: ("sequences", "attention_mask", "ring_attn_group"),
    gather_and_pad_tensor: ("tensor", "ring_attn_group", "ring_attn_pad_len", "indices", "batch", "seqlen"),
}
check_interface("OpenRLHF 0.11.2", version("openrlhf"), INTERFACE)

IMPORTERS = ("openrlhf.models", "openrlhf.trainer.ray.launcher", "openrlhf.trainer.ray.ppo_actor")


class FusedActor(Actor):
    """OpenRLHF's Actor, its logprobs and entropies by the fused operation, at its temperature.

    ValueError for models with images, and for heads that `rlplus.head_of` refuses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "is_vlm", False):
            raise ValueError(f"want a causal language model; got {type(self.model).__name__}, which takes images")
        fuse_head(self.model, temperature=self.temperature)

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: list[int] | None = None,
        return_entropy: bool = False,
    ) -> Any:
        """Logprobs of the actions (B, A), with return_logprobs alone of all tokens but the first (B, T - 1), fp32.

        With return_output also the model's output, whose entropy (B, T - 1) and aux_loss have gradients; it has no
        logits. Both are 0 for tokens that are padding or no action. Without action_mask and return_logprobs: the output
        with logits, as OpenRLHF computes it.
        """
        if action_mask is None and not return_logprobs:
            return super().forward(
                sequences,
                attention_mask=attention_mask,
                return_output=return_output,
                allgather_logits=allgather_logits,
                ring_attn_group=ring_attn_group,
                packed_seq_lens=packed_seq_lens,
                return_entropy=return_entropy,
            )
        assert attention_mask is not None, "want an attention_mask"
        labels = sequences.masked_fill(attention_mask == 0, IGNORED)
        if action_mask is not None:
            labels[:, : -action_mask.shape[1]] = IGNORED
            labels[:, -action_mask.shape[1] :].masked_fill_(action_mask == 0, IGNORED)
        labels[:, 0] = IGNORED  # no state comes before it
        if self.packing_samples:
            packed = partial(unpad_and_slice_tensor, attention_mask=attention_mask, ring_attn_group=ring_attn_group)
            tokens, positions, _, padding, indices = packed(sequences)
            _, _, targets, _, _ = packed(labels)
            out: FusedOutput = self.model(tokens, attention_mask=None, position_ids=positions, targets=targets)
            padded = partial(
                gather_and_pad_tensor, ring_attn_group=ring_attn_group, ring_attn_pad_len=padding, indices=indices,
                batch=sequences.shape[0], seqlen=sequences.shape[1],
            )  # fmt: skip
            logprob = padded(out.logprob)
            out.entropy = padded(out.entropy)
        else:
            positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
            targets = labels.roll(-1, 1)
            out = self.model(sequences, attention_mask=attention_mask, position_ids=positions, targets=targets)
            assert out.logprob is not None
            logprob = out.logprob
        assert out.entropy is not None
        out.entropy = out.entropy[:, :-1]
        logprob = logprob[:, :-1]
        if action_mask is not None:
            logprob = logprob[:, -action_mask.shape[1] :]
        return (logprob, out) if return_output else logprob


def patch() -> None:
    """Let OpenRLHF make a `FusedActor` wherever it makes an Actor, before its script runs.

    Ray pickles the classes of its workers by value, together with the Actor that they name: the workers get this one.
    """
    for name in IMPORTERS:
        if name in sys.modules:
            sys.modules[name].Actor = FusedActor  # type: ignore[attr-defined]
