"""The transformers engine's attention: its definition in float64, and what it reads of keys and values."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from causal_lms import make
from rollout_models import PROMPTS, gap, requests, start
from torch import Tensor

from rlplus.train.rollout import Sampling
from rlplus.train.rollout.transformers_engine import attend


def defined(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """(B, T, H, D), with keys and values repeated for each head that shares them."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) * scaling
    return torch.einsum("bhts,bhsd->bthd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("heads_of_the_mask", [0, 1, 6])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("heads", "shared"), [(6, 3), (6, 6), (6, 1)])
def test_heads_attend_to_the_keys_they_share(heads: int, shared: int, tokens: int, heads_of_the_mask: int) -> None:
    g = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, tokens, 16, dtype=torch.float64, generator=g)
    key, value = (torch.randn(2, heads // shared, 9, 16, dtype=torch.float64, generator=g) for _ in "kv")
    mask = None
    if heads_of_the_mask:
        mask = torch.rand(2, heads_of_the_mask, tokens, 9, generator=g) < 0.7
        mask[..., 0] = True
    elif tokens > 1:
        key, value = key[:, :, :tokens], value[:, :, :tokens]  # a prompt, which `attend` takes for causal
    everything = torch.ones(tokens, key.shape[2], dtype=torch.bool)
    allowed = mask if mask is not None else everything.tril() if tokens > 1 else everything
    out, _ = attend(SimpleNamespace(num_key_value_groups=shared), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(out, defined(query, key, value, allowed, 0.3), rtol=1e-12, atol=1e-12)
    assert out.is_contiguous()


def test_decoding_reads_shared_keys_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four heads on two of keys and values: torch never gets four, with prompts of different lengths."""
    model = make("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}).float()
    model.save_pretrained(tmp_path)
    engine = start("transformers", tmp_path)
    assert model.config._attn_implementation == "sdpa", "other models of the process keep theirs"
    seen, attention = list[tuple[int, int]](), torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if options["attn_mask"] is not None:
            seen.append((options["attn_mask"].shape[2], key.shape[1]))
        return attention(query, key, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        groups = engine.generate(requests(PROMPTS, [3, 2, 1], 6), Sampling(0.8, 0))
    assert {heads for tokens, heads in seen if tokens == 1} == {2}
    assert gap(model, groups, PROMPTS, 0.8) <= 1e-4
