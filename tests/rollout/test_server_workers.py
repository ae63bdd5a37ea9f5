"""Pushes to the real vLLM server with two workers on the CPU: tensor parallel, or two engines (data parallel)."""

from pathlib import Path
from typing import Any

import processes
import pytest
from rollout_models import MAX_MODEL_LEN, PROMPTS, gap, save, tiny_model
from servers import Server, ask, connect, connect_behind_a_killed_run

from rlplus.train.rollout import RunFailed
from rlplus.train.rollout.server_push import Control

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_no_failure_is_taken_for_an_answer_to_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each call that fails on both workers is followed by pushes of whose weights each worker then generates."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    models = [tiny_model(tied=True, seed=seed) for seed in range(3)]
    save(models[0], tmp_path)
    version = 0

    def check(engine: Any) -> None:
        nonlocal version
        for model in models[1:]:
            version += 1
            engine.push_weights(model.named_parameters(), version)
            for seed in range(2):  # engines take requests in turn
                assert gap(model, ask(engine, seed), PROMPTS, 0.7) <= 1e-5

    update = Control.update_weights

    def spoil(control: Control, info: dict[str, Any]) -> None:
        info["parcel"]["entries"][-1][4] = 7
        update(control, info)

    options: dict[str, Any] = {f"{kind}_parallel_size": "2"}
    with Server(tmp_path, tmp_path / "server.log", MAX_MODEL_LEN, **options) as server:
        engine: Any
        engine, command = connect_behind_a_killed_run(server.url, tmp_path)
        check(engine)
        assert "want one run at a time; process" in processes.run(command).stdout
        check(engine)
        with monkeypatch.context() as patch:
            patch.setattr(Control, "update_weights", spoil)
            with pytest.raises(RunFailed, match=r"update_weights: want .* with the trainer's checksum 7; got "):
                engine.push_weights(models[0].named_parameters(), 0)
        check(engine)
        engine.close()
        engine = connect(server.url, tmp_path)
        check(engine)
        engine.close()
