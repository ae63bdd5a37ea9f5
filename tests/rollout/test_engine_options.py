"""Engine arguments of vLLM that pass through: `rollout.vllm`."""

from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_runs import changed
from mixtures import mixture
from plan_cases import paper
from rollout_models import EOS, MAX_MODEL_LEN, PAD, PROMPTS, gap, requests, save, tiny_model
from trainer_runs import run_config

import rlplus.train.rollout
import rlplus.train.rollout.vllm_engine
from rlplus.common.kept_sets import KeptSets
from rlplus.tools.plan import make_cluster, make_plan
from rlplus.train.config import RolloutConfig, load_config
from rlplus.train.config.rollout_section import OWNED
from rlplus.train.rollout import Sampling, make_engine
from rlplus.train.trainer.run_folder import state_to_resume

DEFAULTS = {"enable_chunked_prefill", "max_num_batched_tokens", "use_tqdm_on_load"}  # the trainer's; a user may differ


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine arguments that vLLM, as on CUDA, was last made with; it never gets others later."""
    arguments: dict[str, Any] = {}
    core = SimpleNamespace(get_output=None, shutdown=lambda: None)

    def make(**settings: Any) -> SimpleNamespace:
        arguments.clear()
        arguments.update(settings)
        return SimpleNamespace(
            llm_engine=SimpleNamespace(engine_core=core), init_weight_transfer_engine=lambda request: None
        )

    names = [*OWNED, *DEFAULTS, "max_num_seqs", "speculative_config"]
    module = SimpleNamespace(LLM=make, EngineArgs=make_dataclass("EngineArgs", names), __version__="9.9")
    monkeypatch.setattr(rlplus.train.rollout.vllm_engine, "import_vllm", lambda: module)
    monkeypatch.setattr(rlplus.train.rollout.vllm_engine, "_on_cpu", lambda: False)
    monkeypatch.setattr(rlplus.train.rollout, "_choose", lambda engine: engine)
    return arguments


def start(folder: Path, mode: str = "colocated", rollout: dict[str, Any] | None = None, **options: Any) -> Any:
    if not (folder / "config.json").exists():
        save(tiny_model(tied=False), folder)
    config = RolloutConfig(
        engine="vllm",
        mode=mode,
        max_response_length=16,
        kv_cache_memory_mb=16,
        vllm=options,  # type: ignore[arg-type]
        **(rollout or {}),
    )
    lengths = {"max_model_len": MAX_MODEL_LEN, "end_ids": [EOS], "pad_token_id": PAD}
    return make_engine(config, str(folder), dtype="float32", seed=0, **lengths)


def test_options_reach_the_engine_beside_the_trainers_own(tmp_path: Path, asked: dict[str, Any]) -> None:
    start(tmp_path).close()
    own = dict(asked)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "speculative_config": {"method": "ngram"}}
    start(tmp_path, **options).close()
    assert asked == own | options
    assert own["max_num_batched_tokens"] is None


def test_top_k_asks_for_the_tokens_that_were_kept(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's interface: vLLM returns them on a GPU only."""
    params: list[dict[str, Any]] = []
    engine = start(tmp_path, rollout={"top_k": 8, "top_p": 0.9, "min_p": 0.1})
    assert asked["return_sampling_mask"] is True
    monkeypatch.setattr(engine._vllm, "SamplingParams", lambda **kinds: params.append(kinds), raising=False)
    sampled = SimpleNamespace(
        token_ids=[3, 1],
        logprobs=SimpleNamespace(logprobs=[-0.5, 0.0]),
        finish_reason="stop",
        sampling_mask=SimpleNamespace(token_ids=[[3, 4, 9], [1]]),
    )
    monkeypatch.setattr(engine, "_run", lambda requests: [SimpleNamespace(outputs=[sampled])])
    sampling = Sampling(0.7, 0, top_k=8, top_p=0.9, min_p=0.1)
    ((got,),) = engine.generate(requests([[5]], [1], 4), sampling)
    assert (params[0]["top_k"], params[0]["top_p"], params[0]["min_p"]) == (8, 0.9, 0.1)
    assert got.kept == KeptSets.of([[3, 4, 9], [1]])
    message = "want top_k in all requests .*: it was started with rollout.top_k 8; got 0"
    with pytest.raises(ValueError, match=message):
        engine.generate(requests([[5]], [1], 4), Sampling(0.7, 0))
    engine.close()
    engine = start(tmp_path)
    assert "return_sampling_mask" not in asked
    with pytest.raises(ValueError, match=r"it was started with rollout\.top_k 0; got 8"):
        engine.generate(requests([[5]], [1], 4), sampling)
    engine.close()


def test_a_vllm_that_returns_no_kept_tokens_is_refused(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = rlplus.train.rollout.vllm_engine.import_vllm()
    monkeypatch.setattr(module, "EngineArgs", make_dataclass("EngineArgs", ["seed"]))
    with pytest.raises(ValueError, match=r"rollout.top_k 8 needs the tokens .*; got vLLM 9\.9, which has no such"):
        start(tmp_path, rollout={"top_k": 8})
    assert not asked


@pytest.mark.vllm
def test_the_cpus_vllm_says_that_it_returns_no_kept_tokens(tmp_path: Path) -> None:
    message = r"rollout.top_k 8 needs the tokens that vLLM kept.*rollout.engine transformers.*requires Model Runner V2"
    with pytest.raises(ValueError, match=r"(?s)" + message):
        start(tmp_path, rollout={"top_k": 8})


def test_routing_replay_asks_for_the_experts(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's interface: vLLM returns them on a GPU only, as uint8 in which 255 may be an expert's number."""
    engine = start(tmp_path, rollout={"routing_replay": True})
    assert asked["enable_return_routed_experts"] is True
    monkeypatch.setattr(engine._vllm, "SamplingParams", lambda **_: None, raising=False)
    experts = np.arange(248, 256, dtype=np.uint8).reshape(2, 2, 2)
    logprobs = SimpleNamespace(logprobs=[-0.5, 0.0])
    sampled = SimpleNamespace(token_ids=[3, 1], logprobs=logprobs, finish_reason="stop", routed_experts=experts)
    monkeypatch.setattr(engine, "_run", lambda requests: [SimpleNamespace(outputs=[sampled])])
    ((got,),) = engine.generate(requests([[5]], [1], 4), Sampling(1.0, 0, experts=True))
    assert got.experts.dtype == np.int16
    assert got.experts.tolist() == experts.tolist()
    ((got,),) = engine.generate(requests([[5]], [1], 4), Sampling(1.0, 0))
    assert got.experts is None, "an evaluation asks for none"
    engine.close()
    engine = start(tmp_path)
    assert "enable_return_routed_experts" not in asked
    with pytest.raises(ValueError, match=r"want an engine that was made with rollout\.routing_replay"):
        engine.generate(requests([[5]], [1], 4), Sampling(1.0, 0, experts=True))
    engine.close()
    module = rlplus.train.rollout.vllm_engine.import_vllm()
    monkeypatch.setattr(module, "EngineArgs", make_dataclass("EngineArgs", ["seed"]))
    with pytest.raises(ValueError, match=r"routing_replay needs the experts .*; got vLLM 9\.9, which has no such"):
        start(tmp_path, rollout={"routing_replay": True})


@pytest.mark.vllm
def test_the_cpus_vllm_says_that_it_returns_no_experts(tmp_path: Path) -> None:
    mixture(max_position_embeddings=MAX_MODEL_LEN).save_pretrained(tmp_path)
    message = r"routing_replay needs the experts that vLLM chose.*rollout.engine transformers.*requires Model Runner V2"
    with pytest.raises(ValueError, match=r"(?s)" + message):
        start(tmp_path, rollout={"routing_replay": True})


def test_whatever_the_trainer_sets_is_refused_with_a_reason(tmp_path: Path, asked: dict[str, Any]) -> None:
    start(tmp_path).close()
    assert asked.keys() - DEFAULTS <= OWNED.keys()
    for name in OWNED:
        with pytest.raises(ValueError, match=rf"vllm\.{name}: leave it out, .*{OWNED[name]}"):
            RolloutConfig(max_response_length=8, vllm={name: None})


def test_an_unknown_option_is_refused_with_the_nearest_name(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^rollout\.vllm\.max_num_seq: vLLM 9\.9 has no .*; nearest: max_num_seqs$"):
        start(tmp_path, max_num_seq=4)
    with pytest.raises(ValueError, match=r"^rollout\.vllm\.xyz: vLLM 9\.9 has no such argument$"):
        start(tmp_path, xyz=4)
    assert not asked
    monkeypatch.setattr(rlplus.train.rollout.vllm_engine, "_on_cpu", lambda: True)
    with pytest.raises(ValueError, match=r"^rollout\.vllm\.enable_chunked_prefill: leave it out, on the CPU"):
        start(tmp_path, enable_chunked_prefill=True)


def test_options_are_not_dropped_where_auto_finds_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.train.config.rollout_section.find_spec", lambda name: None)
    config = RolloutConfig(max_response_length=8, vllm={"max_num_seqs": 4})
    with pytest.raises(ValueError, match=r"rollout\.vllm: vLLM is not installed"):
        make_engine(config, "-", dtype="float32", max_model_len=8, end_ids=[0], pad_token_id=0, seed=0)


def test_a_run_resumes_with_the_options_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change the samples by rounding at least."""
    config = run_config(tmp_path, rollout={"engine": "vllm", "vllm": {"max_num_seqs": 4}})
    saved = {"config": config.model_dump(mode="json"), "step": 3, "best": None, "surroundings": {}}
    monkeypatch.setattr("rlplus.train.checkpoint.read_state", lambda folder: saved)
    state_to_resume(tmp_path, config, {})
    with pytest.raises(ValueError, match=r"rollout\.vllm\.max_num_seqs was 4, is 5"):
        state_to_resume(tmp_path, changed(config, "rollout", vllm={"max_num_seqs": 5}), {})


def test_an_option_is_given_on_the_command_line_and_named_by_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    overrides = ["rollout.engine=vllm", "rollout.vllm.speculative_config.num_speculative_tokens=3"]
    assert load_config(path, overrides).rollout.vllm == {"speculative_config": {"num_speculative_tokens": 3}}
    plan = make_plan(paper("rollout.vllm.quantization=fp8"), make_cluster(8, "h200"))
    assert "Not counted: what rollout.vllm changes (quantization)." in plan.note


@pytest.mark.vllm
def test_the_names_are_vllms() -> None:
    from vllm import EngineArgs

    assert OWNED.keys() | DEFAULTS <= EngineArgs.__dataclass_fields__.keys()


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_generates_the_same_with_other_options(tmp_path: Path) -> None:
    """In both modes: without the prefix cache, one sequence at a time, the policy's logprobs. And a mistyped name."""
    for mode in ("colocated", "process"):
        engine = start(tmp_path, mode, max_num_seqs=1, enable_prefix_caching=False)
        model = tiny_model(tied=False, seed=1)
        engine.push_weights(model.named_parameters(), 1)
        groups = engine.generate(requests(PROMPTS, [2] * len(PROMPTS), 16), Sampling(1.0, 0))
        assert gap(model, groups, PROMPTS, 1.0) <= 1e-4
        if mode == "colocated":
            settings = engine._llm.llm_engine.vllm_config
            assert settings.scheduler_config.max_num_seqs == 1
            assert not settings.cache_config.enable_prefix_caching
        engine.close()
        with pytest.raises(ValueError, match=r"rollout\.vllm\.max_num_seq: .*; nearest: max_num_seqs"):
            start(tmp_path, mode, max_num_seq=1)
