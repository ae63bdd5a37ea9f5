"""Our engine of vLLM's weight transfer, made by vLLM's factory, on a model of two layers without vLLM's own."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_models import save, tiny_model
from torch import Tensor, nn

from rlplus.rollout import parcels
from rlplus.rollout.parcels import Memory, Parcel
from rlplus.rollout.push import BACKEND

pytestmark = pytest.mark.vllm


class Layers(nn.Module):
    """A tiny model's parameters by their names there, loaded as vLLM's models do it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.zeros_like(parameter), requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, weight in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], weight)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Any]:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    import rlplus.rollout.receiver  # noqa: F401  # as vLLM's worker does, by its argument worker_extension_cls

    model = tiny_model(tied=False)
    save(model, tmp_path)
    layers = Layers(model)
    record_metadata_for_reloading(layers)
    settings = SimpleNamespace(
        model=str(tmp_path), hf_config_path=None, trust_remote_code=False, dtype=torch.float32, quantization=None
    )
    config: Any = SimpleNamespace(parallel_config=None, model_config=settings)
    made = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=BACKEND), config, torch.device("cpu"), layers
    )
    yield made
    made.shutdown()


def greet(receiver: Any, run: str, pid: int = 0, **changes: list[int]) -> None:
    shapes = {name: list(p.shape) for name, p in tiny_model(tied=False).named_parameters()} | changes
    memory = Memory()
    memory.write(json.dumps({"run": run, "shapes": shapes}).encode())
    hello = memory.seal()
    info = {"run": run, "pid": pid or hello.pid, "fd": hello.fd}
    receiver.init_transfer_engine(receiver.parse_init_info(info))
    memory.close()


def push(
    receiver: Any, weights: Iterator[tuple[str, Tensor]], run: str = "run", change: Callable[[Parcel], Any] = asdict
) -> None:
    receiver.start_weight_update()
    for parcel in parcels.parcels(weights, 20_000, run):
        receiver.update_weights({"parcel": change(parcel)})
    receiver.finish_weight_update()


def check(receiver: Any, model: nn.Module) -> None:
    """The model's bits, in the tensors that were there from the start."""
    loaded = dict(receiver.model.named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())


def test_weights_are_loaded_bit_for_bit_into_the_same_tensors(receiver: Any) -> None:
    places = {name: p.data_ptr() for name, p in receiver.model.named_parameters()}
    greet(receiver, "run")
    for seed in range(2):
        model = tiny_model(tied=False, seed=seed)
        push(receiver, model.named_parameters())
        check(receiver, model)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    receiver.init_transfer_engine(receiver.parse_init_info({"shapes": shapes}))
    model = tiny_model(tied=False, seed=2)
    receiver.start_weight_update()
    receiver.update_weights({"weights": model.named_parameters()})
    receiver.finish_weight_update()
    check(receiver, model)
    assert places == {name: p.data_ptr() for name, p in receiver.model.named_parameters()}


SPOILT = [
    (4, 7, "want model.norm.weight with the trainer's checksum 7; got .*: the parcel is corrupt"),
    (1, "int8", "want model.norm.weight of a dtype among float64, float32, bfloat16, float16; got int8"),
    (2, [4, 16], r"want model.norm.weight of shape \(64,\); got \(4, 16\)"),
    (0, "model.norm.bias", "want the model's parameter names; got 'model.norm.bias'"),
    (0, "model.embed_tokens.weight", "want every parameter once; 'model.embed_tokens.weight' came twice"),
]


@pytest.mark.parametrize(("place", "value", "message"), SPOILT)
def test_a_bucket_that_is_spoilt_is_refused_and_the_next_push_repairs(
    receiver: Any, place: int, value: Any, message: str
) -> None:
    """Nothing of that bucket is loaded. The update stays open, as it does where a trainer is killed."""
    greet(receiver, "run")

    def spoilt(parcel: Parcel) -> dict[str, Any]:
        for entry in parcel.entries:
            if entry[0] == "model.norm.weight":
                entry[place] = value
        return asdict(parcel)

    with pytest.raises(ValueError, match=message):
        push(receiver, tiny_model(tied=False, seed=1).named_parameters(), change=spoilt)
    model = tiny_model(tied=False, seed=2)
    push(receiver, model.named_parameters())
    check(receiver, model)


def test_a_push_must_be_whole(receiver: Any) -> None:
    with pytest.raises(RuntimeError, match="want init_weight_transfer_engine before"):
        receiver.start_weight_update()
    greet(receiver, "run")
    weights = list(tiny_model(tied=False).named_parameters())
    with pytest.raises(ValueError, match=r"want every parameter; 2 did not come: lm_head\.weight, model\.norm\.weight"):
        push(receiver, iter(weights[:-2]))
    receiver.model.load_weights = next
    receiver.start_weight_update()
    with pytest.raises(RuntimeError, match="vLLM stopped loading at model"):
        receiver.update_weights({"weights": iter(weights)})


def test_one_trainer_at_a_time(receiver: Any) -> None:
    with pytest.raises(ValueError, match=r"the model of the run, with model.norm.weight of shape \[65\]; .* \[64\]"):
        greet(receiver, "run", **{"model.norm.weight": [65]})
    with pytest.raises(ValueError, match=r"with model.norm.bias of shape \[64\]; it has None"):
        greet(receiver, "run", **{"model.norm.bias": [64]})
    greet(receiver, "run")
    weights = list(tiny_model(tied=False).named_parameters())
    with pytest.raises(ValueError, match="want a parcel of run run, which took this server over; got other's"):
        push(receiver, iter(weights), "other")
    greet(receiver, "other")  # the same process, which has made another engine
    push(receiver, iter(weights), "other")
    receiver._pid = os.getppid()
    with pytest.raises(ValueError, match=rf"want one run at a time; process {os.getppid()} pushes its weights here"):
        greet(receiver, "third")
    receiver.shutdown()
    greet(receiver, "third")
    push(receiver, iter(weights), "third")
