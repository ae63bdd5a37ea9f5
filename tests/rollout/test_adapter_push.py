"""vLLM applies adapters that come alone: its model is the merged one after every push, whatever it had before."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_models import ALPHA, RANK, Adapted
from rollout_models import PROMPTS, requests

from rlplus.train.rollout import Adapters, RolloutEngine, Sampling
from rlplus.train.rollout.process_engine import ProcessEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LONG = [[7 + i * i % 40 for i in range(300)]]  # more than two of the blocks, of 128 tokens, that vLLM keeps


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(adapted: Adapted) -> Iterator[Any]:
    engine = adapted.start()
    yield engine
    engine.close()


def sampled(
    engine: RolloutEngine, prompts: list[list[int]] = PROMPTS, tokens: int = 16, temperature: float = 1.0
) -> Any:
    return engine.generate(requests(prompts, [4] * len(prompts), tokens), Sampling(temperature, 3))


def check(adapted: Adapted, groups: Any, prompts: list[list[int]] = PROMPTS) -> None:
    """Within twice the error of transformers' own fp32, in which B A x is added up in the same way."""
    ours, plain = adapted.errors(prompts, groups)
    assert ours <= 2 * plain, (ours, plain)


def test_every_push_gives_the_merged_model(adapted: Adapted, engine: Any) -> None:
    """Sampled logprobs, and the tokens of greedy decoding; other adapters' are far away."""
    for version in range(3):
        adapted.change(version)
        pushed = adapted.weights()
        before = [weight.clone() for _, weight in pushed]
        engine.push_weights(iter(pushed), version)
        assert all(torch.equal(weight, old) for (_, weight), old in zip(pushed, before, strict=True))
        groups = sampled(engine)
        check(adapted, groups)
        for prompt, group in zip(PROMPTS, sampled(engine, temperature=0.0), strict=True):
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *group[0].tokens]])
                best = adapted.merged()(ids).logits[0, len(prompt) - 1 : -1].argmax(1)
            assert group[0].tokens == best.tolist()
        adapted.change(version + 1)
        assert adapted.errors(PROMPTS, groups)[0] > 0.1, "the comparison can fail"


def test_keys_and_values_of_other_adapters_are_not_used(
    adapted: Adapted, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the cache were not emptied: to vLLM each push is another adapter."""
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)
    for seed in (11, 12, 11):
        adapted.change(seed)
        engine.push_weights(adapted.weights(), seed)
        first = sampled(engine, LONG, 8)
        check(adapted, first, LONG)
        check(adapted, sampled(engine, LONG, 8), LONG)  # whose keys it has by now


def test_only_adapters_reach_the_workers(adapted: Adapted, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """rank (in + out) numbers for each layer, and the weights that were loaded stay as they are."""
    came: list[torch.Tensor] = []
    call = engine._llm.collective_rpc

    def counted(method: str, kwargs: Any) -> Any:
        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in kwargs["weights"]:
                came.append(weight)
                yield name, weight

        return call(method, kwargs=kwargs | {"weights": each()})

    def base() -> dict[str, torch.Tensor]:
        (found,) = engine._llm.apply_model(lambda model: {name: p.data_ptr() for name, p in model.named_parameters()})
        return found

    monkeypatch.setattr(engine._llm, "collective_rpc", counted)
    held = base()
    engine.push_weights(adapted.weights(), 5)
    linear = [m for n, m in adapted.base.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]
    assert sum(w.numel() for w in came) == sum(RANK * (m.in_features + m.out_features) for m in linear)
    assert base() == held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights[1:], "1 did not come: .*lora_A.weight"),
        (lambda weights: [*weights, ("lm_head.weight", torch.zeros(1))], "got 'lm_head.weight'"),
        (lambda weights: [(weights[0][0], torch.zeros(2, 2)), *weights[1:]], r"of shape \(6, 64\); got \(2, 2\)"),
    ],
    ids=["missing", "unknown", "misshaped"],
)
def test_a_push_that_fails_ends_the_engine(
    adapted: Adapted, engine: Any, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    monkeypatch.setattr(engine, "_failure", None)  # put back afterwards, for the next test
    with pytest.raises(ValueError, match=message):
        engine.push_weights(change(adapted.weights()), 3)
    with pytest.raises(RuntimeError, match="push of version 3 failed half-way: close this engine"):
        sampled(engine)


def test_layers_that_vllm_has_not_are_refused(adapted: Adapted, engine: Any) -> None:
    """vLLM leaves them out in silence."""
    shapes = adapted.adapters.shapes
    odd = {f"model.layers.{i}.mlp.router.lora_{which}.weight": torch.Size([6, 64]) for i in range(4) for which in "AB"}
    with pytest.raises(ValueError, match=r"Qwen2.* has no layer with room .*layers\.0\.mlp\.router, .* and 1 more"):
        engine._llm.collective_rpc("expect_adapters", args=(replace(adapted.adapters, shapes=shapes | odd),))
    engine._llm.collective_rpc("expect_adapters", args=(adapted.adapters,))


def test_room_is_the_next_rank_that_vllm_has(adapted: Adapted) -> None:
    def room(rank: int) -> Any:
        return Adapters(rank, ALPHA, adapted.adapters.shapes).engine_arguments("float32", cpu=True)

    assert [room(rank)["max_lora_rank"] for rank in (1, 6, 8, 9, 512)] == [1, 8, 8, 16, 512]
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert room(6)["lora_target_modules"] == layers
    with pytest.raises(ValueError, match=r"rank is 513, and it has room for 512; want rollout\.lora merged"):
        room(513)


def test_a_process_that_is_killed_comes_back_with_its_adapters(tmp_path: Path) -> None:
    """Adapters of some of the projections that vLLM has in one layer; what is kept for the restart is these alone."""
    adapted = Adapted(tmp_path, ["q_proj", "up_proj", "down_proj"])
    engine = adapted.start(mode="process")
    assert isinstance(engine, ProcessEngine)
    try:
        for version in range(2):
            adapted.change(version)
            engine.push_weights(adapted.weights(), version)
            before = sampled(engine)
            check(adapted, before)
        memory = engine._weights._memory
        assert memory is not None
        assert memory.size < 1.1 * sum(weight.nbytes for _, weight in adapted.weights())
        os.kill(engine.pid, signal.SIGKILL)
        assert sampled(engine) == before
        assert engine.restarts == 1
    finally:
        engine.close()
