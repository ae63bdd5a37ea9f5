"""The methods of `python -m bench.distill` compute the same gradients, and Liger's scratch is what its code takes."""

import pytest
import torch

from rlplus.bench.distill import METHODS, Heads, liger_mb


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_the_methods_agree(kind: str) -> None:
    found = []
    for name in ("torch", "torch 40 MB", "full logits"):
        heads = Heads(9, 8, 50, "float32", kind)
        METHODS[name](heads)()
        assert heads.hidden.grad is not None
        found.append((heads.hidden.grad, heads.weight.grad))
    for got in found[:2]:
        torch.testing.assert_close(got, found[2], rtol=1e-4, atol=1e-7)


def test_scratch_of_liger_is_six_buffers_of_a_chunk() -> None:
    """ceil(152,000 / 3584) = 43 chunks, of 16,384 tokens 382 each, rounded up to 512."""
    assert liger_mb(16_384, 3584, 152_000) == pytest.approx(6 * 4 * 512 * 152_000 / 1e6)
    assert liger_mb(256, 16_000, 16_000) == pytest.approx(6 * 4 * 256 * 16_000 / 1e6)
