"""`rlplus.integrations.openrlhf` with OpenRLHF's own Actor. It needs an environment of its own: `make test-peers`.

OpenRLHF imports flash-attn, which needs CUDA: a few of its functions stand in for it.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

import openrlhf_cases
import pytest
import torch
from torch import Tensor

if find_spec("openrlhf") is None:
    pytest.skip("OpenRLHF is not installed", allow_module_level=True)

import stub_modules

pytestmark = pytest.mark.peers


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


def unpad_input(x: Tensor, mask: Tensor) -> tuple[Any, ...]:
    """-> tokens (N, ...), their places in the flattened batch, and three values that are not used here."""
    indices = mask.flatten().nonzero().flatten()
    return x.flatten(0, 1)[indices], indices, None, None, None


def pad_input(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    return x.new_zeros(batch * seqlen, *x.shape[1:]).index_copy(0, indices, x).unflatten(0, (batch, seqlen))


@pytest.fixture(scope="module")
def ours() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("flash_attn") is None:
            importlib.import_module("transformers.integrations.flash_attention")  # which looks for the package, once
            padding = {f.__name__: f for f in (index_first_axis, unpad_input, pad_input)}
            padding["rearrange"] = lambda x, pattern: x.flatten(0, 1)
            contents = {"flash_attn.bert_padding": padding, "flash_attn.utils.distributed": {"all_gather": None}}
            stub_modules.install(patch, contents, "rlplus.integrations.openrlhf")
        from rlplus.integrations import openrlhf

        with torch.compiler.set_stance("force_eager"):  # OpenRLHF compiles its entropy
            yield openrlhf


@pytest.mark.parametrize("packing", [False, True])
def test_the_logprobs_and_entropies_of_actions(ours: Any, packing: bool) -> None:
    openrlhf_cases.check_actions(ours.Actor, ours.FusedActor, packing)


@pytest.mark.parametrize("packing", [False, True])
def test_the_logprobs_of_every_token(ours: Any, packing: bool) -> None:
    openrlhf_cases.check_every_token(ours.Actor, ours.FusedActor, packing)


def test_patch_replaces_the_actor_that_scripts_import(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models = sys.modules["openrlhf.models"]
    monkeypatch.setattr(models, "Actor", models.Actor)  # undone after the test
    ours.patch()
    assert models.Actor is ours.FusedActor
