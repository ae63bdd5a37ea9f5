"""Filters of rows and of blocks: the share of the logits' gradient that they leave, and the errors of the gradients.

mass of a part: the L1 norm of the logits' gradient there. Everything in float64, from full logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rlplus.loss.head import drop_smallest

ROWS, COLUMNS = 128, 256  # a block has these
CCE = 2.0**-12  # cut cross-entropy drops a block where no |p - 1{target}| reaches this


@dataclass(frozen=True)
class Samples:
    """Rows of sampled tokens: hidden (N, H), target and advantage (N,), and the head's weight (V, H); float32."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    advantage: Tensor

    def logprobs(self) -> Tensor:
        """(N, V), float64."""
        return (self.hidden.double() @ self.weight.double().T).log_softmax(1)


@dataclass(frozen=True)
class Left:
    """The rest behind a filter. rows, blocks, mass: shares that are kept; errors relative to the gradient's norm."""

    rows: float
    blocks: float
    mass: float
    dhidden_error: float
    dweight_error: float


@torch.no_grad()
def draw(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[str],
    group: int,
    most: int,
    seed: int,
) -> Samples:
    """`group` responses of at most `most` tokens to each question, at temperature 1, and advantages.

    The model solves no problem, so that rewards are drawn: 1 with probability 1/4, normalised within the group. A group
    of equal rewards is drawn again, as dynamic sampling does.
    """
    torch.manual_seed(seed)
    eos = tokenizer.eos_token_id
    hidden, target, advantage = [], [], []
    for question in questions:
        prompt = torch.tensor([tokenizer(question).input_ids] * group)
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=most, pad_token_id=eos,
        )  # fmt: skip
        states = model.model(ids).last_hidden_state[:, prompt.shape[1] - 1 : -1]
        response = ids[:, prompt.shape[1] :]
        ended = (response == eos).cumsum(1) - (response == eos).long()  # end tokens before this one
        reward = torch.zeros(group)
        while reward.std() == 0:
            reward = (torch.rand(group) < 0.25).float()
        normed = (reward - reward.mean()) / reward.std()
        keep = ended == 0
        hidden.append(states[keep])
        target.append(response[keep])
        advantage.append(normed[:, None].expand_as(keep)[keep])
    return Samples(torch.cat(hidden).float(), model.lm_head.weight.float(), torch.cat(target), torch.cat(advantage))


def whole_gradient(samples: Samples, logprobs: Tensor) -> Tensor:
    """d loss / d logits (N, V) of the policy gradient, the mean over tokens; float64."""
    slope = (-samples.advantage.double() / len(samples.target))[:, None]
    return slope * (torch.nn.functional.one_hot(samples.target, logprobs.shape[1]) - logprobs.exp())


def rows_kept(samples: Samples, logprobs: Tensor, share: float) -> Tensor:
    """(N,) bool: rows that `grad_filter=share` keeps."""
    slope = -samples.advantage.double() / len(samples.target)
    return drop_smallest(slope, logprobs.gather(1, samples.target[:, None])[:, 0], share) != 0


def block_sums(x: Tensor) -> Tensor:
    """(N, V) to (blocks of rows, blocks of columns)."""
    N, V = x.shape
    padded = torch.nn.functional.pad(x, (0, -V % COLUMNS, 0, -N % ROWS))
    return padded.view(-(-N // ROWS), ROWS, -(-V // COLUMNS), COLUMNS).sum((1, 3))


def blocks_kept(gradient: Tensor, rows: Tensor, share: float, order: Tensor) -> Tensor:
    """(N, V) bool: what is left where, of the kept rows, the smallest blocks go while their sum stays within `share`.

    share is one of the whole gradient's mass; order (V,) is the order of the columns.
    """
    kept = rows.nonzero()[:, 0]
    mass = block_sums(gradient[kept][:, order].abs())
    small, which = mass.flatten().sort()
    dropped = which[small.cumsum(0) <= share * gradient.abs().sum()]
    keep = torch.ones(mass.numel(), dtype=torch.bool)
    keep[dropped] = False
    return spread(keep.view_as(mass), kept, gradient, order)


def spread(keep: Tensor, rows: Tensor, gradient: Tensor, order: Tensor) -> Tensor:
    """Kept blocks (of the given rows and the columns in `order`) as (N, V) bool."""
    N, V = len(rows), gradient.shape[1]
    wide = keep.repeat_interleave(ROWS, 0)[:N].repeat_interleave(COLUMNS, 1)[:, :V]
    mask = torch.zeros(gradient.shape, dtype=torch.bool)
    mask[rows[:, None], order[None]] = wide
    return mask


def cce_kept(samples: Samples, logprobs: Tensor, order: Tensor) -> Tensor:
    """(N, V) bool: what cut cross-entropy's filter keeps, before the advantage is multiplied in."""
    size = (torch.nn.functional.one_hot(samples.target, logprobs.shape[1]) - logprobs.exp()).abs()
    keep = block_sums((size[:, order] >= CCE).double()) > 0
    return spread(keep, torch.arange(len(size)), size, order)


def left(samples: Samples, gradient: Tensor, keep: Tensor) -> Left:
    """keep (N, V) bool, or (N, 1): rows only."""
    hidden, weight = samples.hidden.double(), samples.weight.double()
    change = gradient.masked_fill(keep, 0.0)
    rows = keep.any(1)
    kept = keep.expand_as(gradient)[rows]
    return Left(
        rows=rows.double().mean().item(),
        blocks=kept.double().mean().item() * rows.double().mean().item(),
        mass=1 - (change.abs().sum() / gradient.abs().sum()).item(),
        dhidden_error=((change @ weight).norm() / (gradient @ weight).norm()).item(),
        dweight_error=((change.T @ hidden).norm() / (gradient.T @ hidden).norm()).item(),
    )
