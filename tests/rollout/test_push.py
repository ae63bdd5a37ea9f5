"""A push that hangs names rank and parameter, and the order of sleeping, waking and loading."""

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from ordered_llm import OrderedLLM
from rollout_models import EOS, PAD, PROMPTS, requests, save, start, tiny_model
from torch import Tensor

import rlplus.train.rollout.push
import rlplus.train.rollout.vllm_engine
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout import Adapters, RolloutEngine, RunFailed, Sampling, make_engine
from rlplus.train.rollout.push import RECEIVER, watched

SHAPES = {"first": torch.Size([2]), "second": torch.Size([3])}


class HangClock:
    """Replaces `time` in the module: it stands still but for a hang, so that slowness elsewhere is no timeout."""

    def __init__(self) -> None:
        self.began: float | None = None

    def monotonic(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began

    def hang(self) -> None:
        self.began = time.monotonic()
        time.sleep(processes.PATIENCE_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HangClock:
    clock = HangClock()
    monkeypatch.setattr(rlplus.train.rollout.push, "time", clock)
    return clock


def test_a_parameter_that_does_not_come_is_named(tmp_path: Path, clock: HangClock) -> None:
    """The trainer's side hangs, as in a gather that waits for a rank that is gone."""
    model = tiny_model(tied=True)
    save(model, tmp_path)
    config = RolloutConfig(engine="transformers", max_response_length=8, push_timeout_s=0.3)
    engine = make_engine(
        config, str(tmp_path), dtype="float32", max_model_len=32, end_ids=[EOS], pad_token_id=PAD, seed=0
    )
    names = [name for name, _ in model.named_parameters()]

    def hanging() -> Iterator[tuple[str, Tensor]]:
        for i, (name, p) in enumerate(model.named_parameters()):
            if i == 4:
                clock.hang()
            yield name, p

    with pytest.raises(RunFailed, match=rf"rank 0: the push of version 7 waited .* 0.3 s .* to gather {names[4]} "):
        engine.push_weights(hanging(), 7)
    clock.began = None
    with pytest.raises(RuntimeError, match="push of version 7 failed half-way"):
        engine.generate(requests(PROMPTS, [1, 1, 1], 1), Sampling(1.0, 0))
    engine.push_weights(model.named_parameters(), 8)
    engine.close()


def test_a_parameter_that_is_not_taken_is_named(clock: HangClock) -> None:
    weights = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]

    def push_to(slow: str) -> None:
        clock.began = None
        with watched(weights, SHAPES, version=1, timeout_s=0.2) as checked:
            for name, _ in checked:
                if name == slow:
                    clock.hang()
            clock.hang()

    with pytest.raises(RunFailed, match="for the engine to load second "):
        push_to("second")
    with pytest.raises(RunFailed, match="for the engine to finish after second "):
        push_to("none")


def test_an_alarm_at_the_last_moment_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The push is over, and the clock is being stopped: nothing may be left of it."""
    stop, handler = rlplus.train.rollout.push.Clock._stop, signal.getsignal(signal.SIGALRM)

    def alarmed(running: Any) -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        stop(running)

    monkeypatch.setattr(rlplus.train.rollout.push.Clock, "_stop", alarmed)
    weights = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    with watched(weights, SHAPES, version=1, timeout_s=processes.PATIENCE_S) as checked:
        assert len(list(checked)) == 2
    assert signal.getsignal(signal.SIGALRM) == handler


def test_an_alarm_that_is_due_as_the_body_ends_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised; what watched must not take the body for one that goes on, and end the process."""
    raised, clock = [], rlplus.train.rollout.push.Clock("the body", "some.key", processes.PATIENCE_S)

    def due(number: int, handler: Any) -> Any:
        if handler == signal.SIG_IGN and not raised:
            raised.append(number)
            raise RunFailed("overdue")
        return signal.signal(number, handler)

    monkeypatch.setattr(rlplus.train.rollout.push, "signal", SimpleNamespace(**vars(signal) | {"signal": due}))
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RunFailed, match="overdue"), clock.running("its end"):
        pass
    assert clock._done.is_set()
    assert signal.getsignal(signal.SIGALRM) == before


def test_an_alarm_that_is_due_as_the_body_begins_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Due(threading.Thread):
        def start(self) -> None:
            super().start()
            raise RunFailed("overdue")

    monkeypatch.setattr(rlplus.train.rollout.push, "threading", SimpleNamespace(**vars(threading) | {"Thread": Due}))
    clock, before = rlplus.train.rollout.push.Clock("the body", "some.key", 1.0), signal.getsignal(signal.SIGALRM)
    with pytest.raises(RunFailed, match="overdue"), clock.running("its end"):
        pytest.fail("it did not begin")
    assert clock._done.is_set()
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_slow_push_that_goes_on_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter takes two thirds of the time that it has, by a clock of the test's own."""
    now = [0.0]
    monkeypatch.setattr(rlplus.train.rollout.push, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shapes = {str(i): torch.Size([1]) for i in range(8)}
    handler = signal.getsignal(signal.SIGALRM)
    weights = ((name, torch.zeros(1)) for name in shapes)
    with watched(weights, shapes, version=1, timeout_s=0.3) as checked:
        for _ in checked:
            now[0] += 0.2
            time.sleep(0.1)  # the thread that watches looks every 0.3 s
    assert signal.getsignal(signal.SIGALRM) == handler


def test_a_generation_that_hangs_in_this_process_is_ended(
    tmp_path: Path, clock: HangClock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tiny_model(tied=True), tmp_path)
    config = RolloutConfig(engine="transformers", max_response_length=8, progress_timeout_s=0.3)
    engine: Any = make_engine(
        config, str(tmp_path), dtype="float32", max_model_len=32, end_ids=[EOS], pad_token_id=PAD, seed=0
    )

    monkeypatch.setattr(engine._model, "generate", lambda *_, **__: clock.hang())
    with pytest.raises(RunFailed, match=r"generation waited more than 0.3 s for the first token .rollout.progress_tim"):
        generate(engine)
    assert "in hang" in capfd.readouterr().err
    engine.close()


STUCK = """
import time, types, torch
from rlplus.common.errors import RunFailed
from rlplus.train.rollout import push
push.GRACE_S = 0.2
shapes, hung = {"first": torch.Size([1])}, []
push.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() - hung[0] if hung else 0.0)
def weights():  # the exception never arrives, as with a collective that waits in C++
    hung.append(time.monotonic())
    while True:
        try:
            time.sleep(60)
        except RunFailed:
            pass
    yield
with push.watched(weights(), shapes, version=3, timeout_s=0.2) as checked:
    list(checked)
"""


@pytest.mark.slow
def test_where_no_exception_can_be_raised_the_process_ends() -> None:
    environment = os.environ | {"RANK": "5"}
    done = processes.run([sys.executable, "-c", STUCK], env=environment)
    assert done.returncode == 70
    assert "rank 5: the push of version 3 waited more than 0.2 s for the trainer to gather first " in done.stderr


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts an engine of a model in a folder as on CUDA, with a recording vLLM."""
    module = SimpleNamespace(LLM=OrderedLLM, SamplingParams=lambda **settings: SimpleNamespace(**settings))
    monkeypatch.setattr(rlplus.train.rollout.vllm_engine, "import_vllm", lambda: module)
    monkeypatch.setattr(rlplus.train.rollout.vllm_engine, "_on_cpu", lambda: False)
    monkeypatch.setattr(rlplus.train.rollout, "_choose", lambda engine: engine)

    def start(folder: Path, **settings: Any) -> Any:
        save(tiny_model(tied=True), folder)
        config = RolloutConfig(engine="vllm", max_response_length=8, sleep=True)
        lengths = {"max_model_len": 32, "end_ids": [EOS], "pad_token_id": PAD}
        return make_engine(config, str(folder), seed=0, **lengths, **settings)

    return start


@pytest.fixture
def recorded(on_cuda: Any, tmp_path: Path) -> Iterator[tuple[RolloutEngine, OrderedLLM, Any]]:
    """Such an engine, its vLLM, and the weights to push."""
    engine = on_cuda(tmp_path, dtype="float32")
    yield engine, engine._llm, list(tiny_model(tied=True).named_parameters())
    engine.close()


def generate(engine: RolloutEngine) -> Any:
    return engine.generate(requests(PROMPTS, [1, 1, 1], 8), Sampling(1.0, 0))


def test_sleep_and_wake_in_order(recorded: tuple[RolloutEngine, OrderedLLM, Any]) -> None:
    engine, llm, weights = recorded
    assert llm.settings["enable_sleep_mode"]
    load = ["start", "update", "finish"]
    loading = [*load, "reset_prefix_cache"]
    waking = ["wake_up weights", *load, "wake_up kv_cache", "reset_prefix_cache"]
    engine.push_weights(weights, 0)  # awake from the start
    generate(engine)
    generate(engine)
    engine.sleep()
    engine.sleep()  # twice is once
    assert llm.calls == [*loading, "generate", "generate", "sleep"]
    with pytest.raises(RuntimeError, match="asleep: push weights before generating"):
        generate(engine)
    engine.push_weights(weights, 1)
    generate(engine)
    engine.push_weights(weights, 2)  # an evaluation comes without sleep in between
    assert llm.calls[len(loading) + 3 :] == [*waking, "generate", *loading]
    engine.sleep()
    with pytest.raises(ValueError, match="did not come"):
        engine.push_weights(weights[1:], 3)
    with pytest.raises(RuntimeError, match="close this engine and make a new one"):
        engine.push_weights(weights, 4)


@pytest.mark.vllm
def test_sleep_and_wake_with_adapters(on_cuda: Any, tmp_path: Path) -> None:
    """The base weights, which no push brings, are kept in the host's memory."""
    shapes = {f"model.layers.0.mlp.up_proj.lora_{which}.weight": torch.Size([4, 4]) for which in "AB"}
    weights = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    engine = on_cuda(tmp_path, dtype="bfloat16", adapters=Adapters(4, 8.0, shapes))
    llm = engine._llm
    assert (llm.settings["enable_lora"], llm.settings["max_lora_rank"]) == (True, 8)
    load = ["load_adapters", "reset_prefix_cache", "generate"]
    for version in range(2):
        engine.push_weights(weights, version)
        generate(engine)
        engine.sleep()
    waking = ["wake_up weights", "load_adapters", "wake_up kv_cache", "reset_prefix_cache", "generate"]
    assert llm.calls == [*load, "sleep", *waking, "sleep"]
    engine.close()


@pytest.mark.vllm
def test_adapters_that_vllm_cannot_apply_are_refused(
    on_cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = Adapters(4, 8.0, {"model.layers.0.mlp.up_proj.lora_A.weight": torch.Size([4, 4])})
    with pytest.raises(ValueError, match=r"kernels on a GPU take bfloat16, .* float32; want rollout.lora merged"):
        on_cuda(tmp_path, dtype="float32", adapters=adapters)

    def refuse(_: OrderedLLM, **settings: Any) -> None:
        raise ValueError("Qwen2ForCausalLM does not support LoRA yet.")  # vLLM's words

    monkeypatch.setattr(OrderedLLM, "__init__", refuse)
    with pytest.raises(ValueError, match=r"Qwen2.* does not support LoRA yet\.; want rollout.lora merged"):
        on_cuda(tmp_path, dtype="bfloat16", adapters=adapters)
    with pytest.raises(ValueError, match=r"^Qwen2ForCausalLM does not support LoRA yet\.$"):
        on_cuda(tmp_path, dtype="bfloat16")


def test_the_recording_can_fail(recorded: tuple[RolloutEngine, OrderedLLM, Any]) -> None:
    _, llm, _ = recorded
    llm.sleep(level=2)
    with pytest.raises(AssertionError, match="asleep"):
        llm.start_weight_update()
    llm.wake_up(["weights"])
    with pytest.raises(AssertionError, match="after the weights"):
        llm.wake_up(["kv_cache"])


@pytest.mark.vllm
def test_the_recorded_methods_are_vllms() -> None:
    """Every call that the recording takes fits the installed vLLM's own signatures."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    for name, method in vars(OrderedLLM).items():
        if name.startswith("__") or name in ("generate",):
            continue
        theirs = list(inspect.signature(getattr(LLM, name)).parameters.values())
        ours = list(inspect.signature(method).parameters.values())
        assert [p.name for p in ours] == [p.name for p in theirs], name
        assert [p.default for p in ours] == [p.default for p in theirs], name
    assert list(inspect.signature(LLM.generate).parameters)[1:3] == ["prompts", "sampling_params"]
    assert {"use_tqdm", "lora_request"} <= inspect.signature(LLM.generate).parameters.keys()
    names = set(inspect.signature(EngineArgs).parameters)
    assert {"enable_sleep_mode", "tensor_parallel_size", "distributed_executor_backend", "logprobs_mode"} <= names
    assert RECEIVER.keys() <= names
    with pytest.raises(ValueError, match="CUDA only"):
        rlplus.train.rollout.vllm_engine.VLLMEngine(
            RolloutConfig(engine="vllm", max_response_length=8, sleep=True),
            "nowhere",
            dtype="float32",
            max_model_len=32,
            end_ids=[EOS],
            seed=0,
        )


def test_engines_that_do_not_sleep_stay_awake(tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    save(model, tmp_path)
    engine = start("transformers", tmp_path)
    engine.sleep()
    assert len(generate(engine)) == 3
    engine.close()
