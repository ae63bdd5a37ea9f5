"""The tables of what-fits.md are the plan's. All rows take minutes, so that most are slow."""

from itertools import pairwise
from pathlib import Path

import pytest
import quick
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from docs import what_fits

PAGE = Path(__file__).parents[2] / "docs/what-fits.md"
BILLIONS = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.77, "32B": 32.76}  # Qwen2.5's model cards
ROWS = [(size, tuning) for size in what_fits.MODELS for tuning in what_fits.TUNINGS]


def row(size: str, tuning: str) -> list[str]:
    """The cells of a model in the page's table."""
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index(f"<!-- begin {tuning} -->") : text.index(f"<!-- end {tuning} -->")]
    (line,) = (line for line in part.splitlines() if line.startswith(f"| {size} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(("size", "tuning"), quick.only([("0.5B", "full")], ROWS))
def test_a_row_is_the_plans(size: str, tuning: str) -> None:
    assert list(what_fits.fewest(size, tuning)) == row(size, tuning)


@pytest.mark.parametrize("tuning", what_fits.TUNINGS)
def test_more_memory_never_takes_more_gpus(tuning: str) -> None:
    """Nor does a smaller model, nor LoRA."""

    def gpus(size: str, tuning: str) -> list[int]:
        return [99 if cell.startswith("not") else int(cell.split()[0]) for cell in row(size, tuning)]

    sizes = [gpus(size, tuning) for size in what_fits.MODELS]
    assert all(needed == sorted(needed, reverse=True) for needed in sizes)
    for smaller, larger in pairwise(sizes):
        assert all(a <= b for a, b in zip(smaller, larger, strict=True))
    full = [gpus(size, "full") for size in what_fits.MODELS]
    assert all(a <= b for needed, most in zip(sizes, full, strict=True) for a, b in zip(needed, most, strict=True))


@pytest.mark.parametrize("size", what_fits.MODELS)
def test_the_shapes_have_the_parameters_of_the_released_models(size: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen2", **dict(zip(what_fits.NAMES, what_fits.MODELS[size], strict=True)))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert round(parameters / 1e9, 2) == BILLIONS[size]
