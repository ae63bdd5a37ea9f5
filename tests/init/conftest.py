"""A tiny model for `rlplus init`, whose memory is counted once for all tests."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from rlplus.tools.plan.activations import count_activations, count_inference
from rlplus.train.config import ScratchModel
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.pretrained import make_scratch_model, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    scratch = ScratchModel(hidden_size=32, layers=1, heads=2, intermediate_size=64, max_position_embeddings=1024)
    write_model(make_scratch_model(scratch, tokenizer, seed=0), str(folder))
    tokenizer.save_pretrained(folder)
    return str(folder)


def remembering(count: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which goes through a model once for each model and options."""
    known: dict[tuple[object, ...], Any] = {}

    def counted(lm: PreTrainedModel, **options: object) -> Any:
        tensors = (*lm.named_parameters(), *lm.named_buffers())
        shapes = tuple((name, x.shape, x.dtype, x.requires_grad) for name, x in tensors)
        key = lm.config.to_json_string(use_diff=False), shapes, *sorted(options.items())
        if key not in known:
            known[key] = count(lm, **options)
        return known[key]

    return counted


COUNTS = {f.__name__: remembering(f) for f in (count_activations, count_inference)}


@pytest.fixture(autouse=True)
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, counted in COUNTS.items():
        monkeypatch.setattr(f"rlplus.tools.plan.planned_model.{name}", counted)
