"""Our engine of vLLM's weight transfer, made by vLLM's factory, on a model of two layers without vLLM's own."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_models import save, tiny_model
from torch import Tensor, nn

import rlplus
from rlplus.train.rollout import parcels, worker_answers
from rlplus.train.rollout.parcels import Memory, Parcel
from rlplus.train.rollout.push import BACKEND
from rlplus.train.rollout.worker_answers import Answers

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_answers, "ANSWERS_S", 0.1)


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

    import rlplus.train.rollout.receiver  # noqa: F401  # as vLLM's worker does, by its argument worker_extension_cls

    model = tiny_model(tied=False)
    save(model, tmp_path)
    layers = Layers(model)
    record_metadata_for_reloading(layers)
    settings = SimpleNamespace(
        model=str(tmp_path), hf_config_path=None, trust_remote_code=False, dtype=torch.float32, quantization=None
    )
    parallel = SimpleNamespace(rank=0, world_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=settings)
    made = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=BACKEND), config, torch.device("cpu"), layers
    )
    yield made
    made.shutdown()


def greet(
    receiver: Any,
    run: str = "run",
    changes: Mapping[str, Any] | None = None,
    left_open: bool = False,
    **shapes: list[int],
) -> Answers:
    """Introduce this process, as a trainer that knows shapes and says what else is changed; workers' answers to it."""
    answers, memory = Answers(1), Memory()
    known = {name: list(p.shape) for name, p in tiny_model(tied=False).named_parameters()} | shapes
    said = {"run": run, "rlplus": rlplus.__version__, "answers": answers.fd, "shapes": known} | (changes or {})
    memory.write(json.dumps(said).encode())
    hello = memory.seal()
    receiver.init_transfer_engine(receiver.parse_init_info({"run": run, "pid": hello.pid, "fd": hello.fd}))
    memory.close()
    assert answers.check("init_weight_transfer_engine")[0]["open"] == left_open
    return answers


def push(
    receiver: Any,
    answers: Answers,
    weights: Iterator[tuple[str, Tensor]],
    run: str = "run",
    change: Callable[[Parcel], Any] = asdict,
) -> None:
    """A push as `MemoryPush` makes it; the receiver itself raises nothing."""
    receiver.start_weight_update()
    answers.check("start_weight_update")
    for parcel in parcels.parcels(weights, 20_000, run):
        receiver.update_weights({"parcel": change(parcel)})
        answers.check("update_weights")
    receiver.finish_weight_update()
    answers.check("finish_weight_update")


def check(receiver: Any, model: nn.Module) -> None:
    """The model's bits, in the tensors that were there from the start."""
    loaded = dict(receiver.model.named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())


def test_weights_are_loaded_bit_for_bit_into_the_same_tensors(receiver: Any) -> None:
    """Those of another process, and those of this one, whose errors are raised."""
    places = {name: p.data_ptr() for name, p in receiver.model.named_parameters()}
    answers = greet(receiver)
    for seed in range(2):
        model = tiny_model(tied=False, seed=seed)
        push(receiver, answers, model.named_parameters())
        check(receiver, model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for said in ({}, json.loads(json.dumps(shapes))):
        with pytest.raises(ValueError, match=r"want run, pid and fd of a trainer; shapes alone are for an engine"):
            receiver.init_transfer_engine(receiver.parse_init_info({"shapes": said}))
    receiver.init_transfer_engine(receiver.parse_init_info({"shapes": shapes}))
    model = tiny_model(tied=False, seed=2)
    receiver.start_weight_update()
    receiver.update_weights({"weights": model.named_parameters()})
    receiver.finish_weight_update()
    check(receiver, model)
    receiver.start_weight_update()
    model = tiny_model(tied=False, seed=3)
    for parcel in parcels.parcels(model.named_parameters(), 20_000, ""):  # an engine in a process of its own
        receiver.update_weights({"parcel": asdict(parcel)})
    receiver.finish_weight_update()
    check(receiver, model)
    assert places == {name: p.data_ptr() for name, p in receiver.model.named_parameters()}
    receiver.start_weight_update()
    with pytest.raises(ValueError, match="want a parcel of '', the run that pushes here; got one of 'other'"):
        receiver.update_weights({"parcel": asdict(next(parcels.parcels(model.named_parameters(), 20_000, "other")))})
    with pytest.raises(ValueError, match="did not come"):
        receiver.finish_weight_update()


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
    answers = greet(receiver)

    def spoilt(parcel: Parcel) -> dict[str, Any]:
        for entry in parcel.entries:
            if entry[0] == "model.norm.weight":
                entry[place] = value
        return asdict(parcel)

    with pytest.raises(OSError, match=f"update_weights: {message}"):
        push(receiver, answers, tiny_model(tied=False, seed=1).named_parameters(), change=spoilt)
    model = tiny_model(tied=False, seed=2)
    push(receiver, answers, model.named_parameters())
    check(receiver, model)


def test_a_push_must_be_whole(receiver: Any) -> None:
    answers = greet(receiver)
    weights = list(tiny_model(tied=False).named_parameters())
    with pytest.raises(OSError, match=r"want every parameter; 2 did not come: lm_head\.weight, model\.norm\.weight"):
        push(receiver, answers, iter(weights[:-2]))
    receiver.model.load_weights = next
    with pytest.raises(OSError, match="vLLM stopped loading at model"):
        push(receiver, answers, iter(weights))


def test_calls_out_of_order_are_refused_and_raise_nothing(receiver: Any) -> None:
    """As the server's workers do when it was started again, or a stranger calls."""
    receiver.start_weight_update()
    receiver.update_weights({"parcel": {}})
    receiver.finish_weight_update()
    answers = greet(receiver)
    for call, arguments in (("update_weights", [{}]), ("finish_weight_update", [])):
        getattr(receiver, call)(*arguments)
        with pytest.raises(OSError, match=f"{call}: want start_weight_update before {call}"):
            answers.check(call)
    receiver.start_weight_update()
    answers.check("start_weight_update")
    for info in ({}, {"weights": [["w", [1.0]]]}, {"speed": 1}):
        receiver.update_weights(info)
        with pytest.raises(OSError, match="update_weights: "):
            answers.check("update_weights")


def test_one_trainer_at_a_time(receiver: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match=r"the model of the run, with model.norm.weight of shape \[65\]; .* \[64\]"):
        greet(receiver, **{"model.norm.weight": [65]})
    with pytest.raises(OSError, match=r"with model.norm.bias of shape \[64\]; it has None"):
        greet(receiver, **{"model.norm.bias": [64]})
    first = greet(receiver)
    weights = list(tiny_model(tied=False).named_parameters())
    with pytest.raises(OSError, match="want a parcel of 'run', the run that pushes here; got one of 'other'"):
        push(receiver, first, iter(weights), "other")
    second = greet(receiver, "other", left_open=True)  # the same process, which has made another engine
    push(receiver, second, iter(weights), "other")
    first.close()
    assert receiver._trainer.alive()
    receiver._trainer.pid = os.getppid()
    with pytest.raises(OSError, match=rf"want one run at a time; process {os.getppid()} pushes its weights here"):
        greet(receiver, "third")
    receiver.shutdown()  # a stranger asks for it, and vLLM does not say who
    assert f"process {os.getppid()} pushes its weights here until it ends: not shut down" in caplog.text
    push(receiver, second, iter(weights), "other")
    second.close()
    push(receiver, greet(receiver, "third"), iter(weights), "third")


def test_what_was_left_open_is_told_to_the_next_trainer(receiver: Any) -> None:
    greet(receiver)
    receiver.start_weight_update()
    greet(receiver, left_open=True)
    receiver.finish_weight_update()
    greet(receiver)


@pytest.mark.parametrize(("rank", "raises"), [(0, False), (1, True)])
def test_a_trainer_that_cannot_be_answered_is_refused_by_the_last_worker(
    receiver: Any, rank: int, raises: bool
) -> None:
    """vLLM reads answers up to the first that failed."""
    receiver.parallel_config = SimpleNamespace(rank=rank, world_size=2)
    spoilt = [
        ({"run": "another"}, "want run run in the memory of process"),
        ({"rlplus": "0.1"}, f"want rlplus 0.1, the trainer's, beside vLLM; got {rlplus.__version__}"),
        ({"answers": 10**6}, "want the trainer's pipe at /proc/"),
    ]
    for changes, message in spoilt:
        expected = ValueError if raises else OSError  # here: no answer comes
        with pytest.raises(expected, match=message if raises else "want 1 workers' answers"):
            greet(receiver, changes=changes)
    info = receiver.parse_init_info({"run": "run", "pid": os.getpid(), "fd": 10**6})
    with pytest.raises(ValueError, match="want the trainer's memory at") if raises else nullcontext():
        receiver.init_transfer_engine(info)
