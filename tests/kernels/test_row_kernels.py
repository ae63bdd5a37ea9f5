"""Contract of the kernels that take rows of logits or of exponentials; without CUDA in Triton's interpreter."""

import math
from collections.abc import Callable

import pytest
import torch
from head_cases import huge
from head_rows import BLOCK_V, DENTROPY, DLOGPROB, ENTROPY, LOGPROB, WAYS, begun, by_blocks, closed, statistics
from torch import Tensor

from rlplus.kernels import exponentials as row_kernels
from rlplus.kernels.tiling import Block
from rlplus.loss.objective.tokens import FLOOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps
EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@EVERY_WAY
def test_a_maximum_that_rises_from_block_to_block(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    logits = (
        torch.randn(3, 3 * BLOCK_V + 50, device=DEVICE) + 3 * torch.arange(3 * BLOCK_V + 50, device=DEVICE) / BLOCK_V
    )
    target = torch.tensor([1, BLOCK_V, 3 * BLOCK_V + 49], device=DEVICE)
    got = way(logits, target).double()
    logp = logits.double().log_softmax(1)
    torch.testing.assert_close(got[:, LOGPROB], logp[torch.arange(3), target], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, ENTROPY], -(logp.exp() * logp).sum(1), rtol=1e-5, atol=1e-5)


def test_a_target_behind_the_vocabulary_is_no_token_though_there_is_a_column() -> None:
    for V in (5, BLOCK_V, BLOCK_V + 7):
        logits, target = torch.zeros(2, V + 1, device=DEVICE), torch.tensor([V - 1, V], device=DEVICE)
        assert begun(logits, V, target)[:, LOGPROB].isnan().tolist() == [False, True]
        values = statistics(logits, target, V)
        assert values[:, LOGPROB].isnan().tolist() == [False, True]


@EVERY_WAY
def test_peaked_policy_keeps_its_small_entropy(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    logits = torch.zeros(1, 2 * BLOCK_V + 300, device=DEVICE)
    logits[0, 7], logits[0, 8] = 1000, 986  # one rival: the entropy is about 15 e^-14 = 1.2e-5
    entropy = way(logits, torch.tensor([7], device=DEVICE))[0, ENTROPY]
    logp = logits[0].double().log_softmax(0)
    torch.testing.assert_close(entropy.double(), -(logp.exp() * logp).sum(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("entropy", [False, True])
def test_both_gradients_of_rows_are_the_closed_form_and_sum_to_0(entropy: bool) -> None:
    """From logits and from exponentials; a row without slopes is 0, whatever it held."""
    V = BLOCK_V + 100
    logits = 3 * torch.randn(5, V, device=DEVICE)
    logits[1] = math.nan
    target = torch.tensor([0, BLOCK_V, BLOCK_V + 99, 5, 6], device=DEVICE)
    e = torch.full((5, V + 3), math.nan, device=DEVICE)
    values = statistics(logits, target, kept=e)
    values[:, DLOGPROB] = torch.tensor([0.7, 0.0, -1.1, 0.0 if entropy else 0.3, 2.0])
    values[:, DENTROPY] = torch.tensor([-0.3, 0.0, 0.0, 0.5, 1e-3]) * entropy
    out = torch.full((5, V + 2), 9.0, device=DEVICE)
    row_kernels.row_gradient(out, values, logits, V, target, None, 1.0)
    assert out[:, V:].eq(9).all()
    logp = logits.double().log_softmax(1)
    onehot = torch.nn.functional.one_hot(target, V)
    a, h = (values[:, column, None].double() for column in (DLOGPROB, DENTROPY))
    want = a * (onehot - logp.exp()) - h * logp.exp() * (logp - (logp.exp() * logp).sum(1, keepdim=True))
    want[1] = 0.0
    for got in (out[:, :V], closed(values, e, V, target, 1.0, entropy=entropy)):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=4 * EPS)
        assert (got.sum(1).abs() <= 16 * EPS * got.abs().sum(1)).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_no_token_has_no_element_of_its_own(entropy: bool) -> None:
    """Also where a slope says that it has: it would be added outside of the weight."""
    target = torch.tensor([-100, 20, 3], device=DEVICE)
    e = torch.empty(3, 20, device=DEVICE)
    values = statistics(torch.randn(3, 20, device=DEVICE), target, kept=e)
    values[:, DLOGPROB], values[:, DENTROPY] = 0.5, 0.1 * entropy
    factor, own = torch.empty(2, 3, device=DEVICE)
    row_kernels.close_rows(factor, own, values, e, 20, target, 1.0, entropy=entropy)
    assert (own != 0).tolist() == [False, False, True]


@pytest.mark.parametrize("gap", [39.0, 41.0, 90.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_whose_token_is_next_to_impossible_beside_others(gap: float, dtype: torch.dtype) -> None:
    """About e^-40 the reference changes from the target's logit to the largest."""
    V = 300
    logits = torch.randn(4, V, device=DEVICE)
    logits[1:3] *= 0.1
    target = torch.tensor([7, 8, 9, 10], device=DEVICE)
    logits[torch.arange(1, 3), target[1:3]] = -gap
    for parts in (1, 2):
        e = torch.empty(4, V, device=DEVICE, dtype=torch.float32) if parts == 1 else None
        values = statistics(logits, target, parts=parts, kept=e, block=Block(64, 4))
        logp = logits.double().log_softmax(1)
        torch.testing.assert_close(
            values[:, LOGPROB].double(), logp.gather(1, target[:, None])[:, 0], rtol=4 * EPS, atol=4 * EPS
        )
        torch.testing.assert_close(values[:, ENTROPY].double(), -(logp.exp() * logp).sum(1), rtol=1e-5, atol=1e-5)
        if e is not None:
            values[:, DLOGPROB], values[:, DENTROPY] = 0.5, 0.0
            got = closed(values, e.to(dtype), V, target, 1.0)
            want = 0.5 * (torch.nn.functional.one_hot(target, V) - logp.exp())
            rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
            assert ((got.double() - want).abs() <= want.abs() * (1e-5 + rounding)).all()


def test_a_reference_that_changes_in_a_later_block() -> None:
    """The target is next to impossible, the first block ten nats above it, a later one two hundred."""
    V = 3 * BLOCK_V + 50
    logits = torch.randn(2, V, device=DEVICE)
    logits[:, : BLOCK_V // 2] -= 190
    logits[:, 5] = -200
    target = torch.tensor([5, 5], device=DEVICE)
    values, logp = by_blocks(logits, target), logits.double().log_softmax(1)
    torch.testing.assert_close(values[:, LOGPROB].double(), logp[:, 5], rtol=1e-6, atol=0)
    flat = torch.cat([logits[:, : BLOCK_V // 2] + 190, logits[:, :1] * 0 - 45], 1)  # the first block still counts
    flat = torch.cat([flat, 2 + flat.new_zeros(2, 2 * BLOCK_V)], 1)
    flat[:, 5] = -45
    values, logp = by_blocks(flat, target), flat.double().log_softmax(1)
    torch.testing.assert_close(values[:, LOGPROB].double(), logp[:, 5], rtol=1e-6, atol=0)
    torch.testing.assert_close(values[:, ENTROPY].double(), -(logp.exp() * logp).sum(1), rtol=1e-5, atol=1e-5)


def test_a_reference_that_changes_in_a_block_that_counts_as_much_as_the_one_before() -> None:
    """Neither block alone is too large for the target as the reference."""
    logits = torch.zeros(2, 3 * BLOCK_V, device=DEVICE)
    logits[:, 7], logits[:, BLOCK_V : BLOCK_V + 2] = 39.2, 38.6
    values, logp = by_blocks(logits, torch.tensor([5, 5], device=DEVICE)), logits.double().log_softmax(1)
    torch.testing.assert_close(values[:, LOGPROB].double(), logp[:, 5], rtol=1e-6, atol=0)
    torch.testing.assert_close(values[:, ENTROPY].double(), -(logp.exp() * logp).sum(1), rtol=1e-5, atol=1e-5)


def test_a_nearly_sure_token_keeps_all_its_digits() -> None:
    """1 - p = 3e-7 and 2e-12: logprob and gradient to 1e-5 of themselves."""
    V = 400
    logits = torch.zeros(2, V, device=DEVICE)
    logits[0, 9], logits[1, 301] = 21.0, 33.0
    target = torch.tensor([9, 301], device=DEVICE)
    for parts in (1, 3):
        e = torch.empty(2, V, device=DEVICE) if parts == 1 else None
        values = statistics(logits, target, parts=parts, kept=e, block=Block(64, 4))
        logprob = -torch.tensor([399 * math.exp(-21.0), 399 * math.exp(-33.0)], dtype=torch.float64).log1p()
        torch.testing.assert_close(values[:, LOGPROB].double().cpu(), logprob, rtol=1e-5, atol=0)
        values[:, DLOGPROB], values[:, DENTROPY] = 1.0, 0.0
        out = torch.empty_like(logits)
        row_kernels.row_gradient(out, values, logits, V, target, None, 1.0)
        for got in (out,) if e is None else (out, closed(values, e, V, target, 1.0)):
            own = got.gather(1, target[:, None])[:, 0].double().cpu()
            torch.testing.assert_close(own, -torch.expm1(logprob), rtol=1e-5, atol=0)


@EVERY_WAY
def test_impossible_and_undefined_logits(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As in log_softmax: -inf is no token; all -inf, a NaN or a +inf make the row NaN."""
    V = 2 * BLOCK_V + 50
    logits = torch.randn(7, V, device=DEVICE)
    logits[0, : BLOCK_V + 3] = -math.inf  # a whole block before the first possible token
    logits[1, BLOCK_V:] = -math.inf
    logits[2] = -math.inf
    logits[3, BLOCK_V + 1] = math.nan
    logits[4, BLOCK_V + 1] = math.inf
    logits[5] = logits[5] - 3e38
    target = torch.tensor([BLOCK_V + 9, BLOCK_V + 9, 0, 0, 0, 0, -1], device=DEVICE)
    values = way(logits, target)
    logp = logits.double().log_softmax(1).clamp(min=FLOOR)
    logprob = logp.gather(1, target.clamp(min=0)[:, None]).squeeze(1).masked_fill(target < 0, math.nan)
    torch.testing.assert_close(values[:, LOGPROB].double(), logprob, equal_nan=True, rtol=1e-5, atol=1e-5)
    entropy = -(logp.exp() * logp).sum(1)
    torch.testing.assert_close(values[:, ENTROPY].double(), entropy, equal_nan=True, rtol=1e-5, atol=1e-5)
    values[:, DLOGPROB], values[:, DENTROPY] = 0.5, 0.25
    out = torch.empty_like(logits)
    row_kernels.row_gradient(out, values, logits, V, target, None, 1.0)
    assert out[[0, 1, 5, 6]].isfinite().all()
    assert out[0, : BLOCK_V + 3].eq(0).all()
    assert out[[2, 3, 4]].isnan().all()


def test_offsets_beyond_2_to_the_31() -> None:
    stride, V = 2**31 // 2 + 10, 20  # row 2 begins past 2^31 elements
    logits, out = huge(DEVICE, 3, stride, V), huge(DEVICE, 3, stride, V)
    logits.copy_(torch.randn(3, V))
    target = torch.tensor([3, 4, 5], device=DEVICE)
    e, near = huge(DEVICE, 3, stride, V), torch.empty(3, V, device=DEVICE)
    values, want = statistics(logits, target, kept=e), statistics(logits.contiguous(), target, kept=near)
    values[:, DLOGPROB : DENTROPY + 1] = want[:, DLOGPROB : DENTROPY + 1] = 1.0
    assert torch.equal(values, want)
    assert torch.equal(closed(values, e, V, target, 1.0), closed(want, near, V, target, 1.0))
    row_kernels.row_gradient(out, values, logits, V, target, None, 1.0)
    row_kernels.row_gradient(near, want, logits.contiguous(), V, target, None, 1.0)
    assert torch.equal(out.contiguous(), near)
