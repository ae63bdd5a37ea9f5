"""An SGLang server: what is asked of it and refused, against a stub; and the real one, where SGLANG names a Python."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import write_start
from rollout_models import EOS, MAX_MODEL_LEN, ODD_LOGPROBS, ODD_TOKENS, PAD, PROMPTS, gap, requests, save, tiny_model
from sglang_servers import OTHER_END, FakeSGLang, RealSGLang, whole_response
from trainer_runs import metrics, run_config

import rlplus.train.rollout.sglang_engine
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout import RolloutEngine, RunFailed, Sampling, make_engine
from rlplus.train.trainer import train


def connect(url: str, path: Path, dtype: str = "float32", **changes: Any) -> RolloutEngine:
    folder = {"weights_folder": str(path / "shared")}
    config = RolloutConfig(engine="sglang", mode="server", server_url=url, max_response_length=16, **folder | changes)
    lengths: dict[str, int] = {"max_model_len": MAX_MODEL_LEN, "end_ids": [EOS], "pad_token_id": PAD}
    return make_engine(config, str(path), dtype=dtype, seed=0, **lengths)


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    server = FakeSGLang()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def engine(fake: FakeSGLang, tmp_path: Path) -> RolloutEngine:
    """It holds the weights of version 1."""
    save(tiny_model(tied=False), tmp_path)
    engine = connect(fake.url, tmp_path)
    engine.push_weights(tiny_model(tied=False).named_parameters(), 1)
    return engine


def test_weights_go_through_the_folder(fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several files, of which nothing is left. Before that nothing is generated."""
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = connect(fake.url, tmp_path)
    with pytest.raises(RuntimeError, match="the server may hold any weights: push before generating"):
        engine.generate(requests(PROMPTS, [1, 1, 1], 4), Sampling(1.0, 0))
    monkeypatch.setattr(rlplus.train.rollout.sglang_engine, "SHARD_BYTES", 30_000)
    killed = tmp_path / "shared" / f"{prefix_of(fake)}0123"
    killed.mkdir(0o700, parents=True)
    (killed / "model-00099.safetensors").write_bytes(b"what a killed run left")
    engine.push_weights(model.named_parameters(), 3)
    assert fake.version == "3"
    assert len(fake.loaded) > 2
    loaded = {name: weight for shard in fake.loaded for name, weight in shard.items()}
    assert loaded.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())
    assert fake.keys == {"Bearer secret"}
    assert not [*(tmp_path / "shared").iterdir()]
    killed.mkdir(0o700)
    (killed / ".nfs0001").touch()  # NFS leaves it while the server maps a deleted file
    engine.push_weights(model.named_parameters(), 4)
    assert fake.version == "4"
    first, second = (Path(body["model_path"]) for body in fake.pushed)
    assert first.parent == second.parent == tmp_path / "shared"
    assert first.name != second.name
    assert re.fullmatch(re.escape(prefix_of(fake)) + "[0-9a-f]{32}", first.name), "nobody can guess it"
    assert fake.modes == [0o700, 0o700]
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(requests(PROMPTS, [1, 1, 1], 4), Sampling(1.0, 0))


def prefix_of(fake: FakeSGLang) -> str:
    return f"rlplus-weights-{fake.url.removeprefix('http://').replace(':', '-')}-"


@pytest.mark.parametrize("planted", ["link", "open folder", "another user's", "a link in an own folder", "file"])
def test_nothing_that_others_planted_is_followed_or_removed(
    fake: FakeSGLang, engine: RolloutEngine, tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push deletes the weights of this user's earlier pushes, and nothing behind a link."""
    precious, there = tmp_path / "precious", tmp_path / "shared" / f"{prefix_of(fake)}0123"
    precious.mkdir(0o700)
    weights = precious / "model-00001.safetensors"
    weights.write_bytes(b"somebody's")
    there.parent.mkdir(exist_ok=True)
    if planted == "link":
        there.symlink_to(precious)
    elif planted == "file":
        there.touch()
    else:
        there.mkdir(0o777 if planted == "open folder" else 0o700)
        there.chmod(0o777 if planted == "open folder" else 0o700)
        target = weights if planted.startswith("a link") else there / "model-00001.safetensors"
        if target == weights:
            (there / "model-00001.safetensors").symlink_to(weights)
        else:
            target.write_bytes(b"theirs")
        if planted == "another user's":
            lstat = Path.lstat
            changed = [65534 if i == 4 else each for i, each in enumerate(lstat(there))]
            monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result(changed) if path == there else lstat(path))
    engine.push_weights(tiny_model(tied=False).named_parameters(), 2)
    assert fake.version == "2"
    assert weights.read_bytes() == b"somebody's"
    assert there.exists() == (planted != "a link in an own folder")
    assert [*(tmp_path / "shared").iterdir()] == ([there] if there.exists() else [])


@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize(
    ("mode", "owner", "message"),
    [
        (0o777, None, r"more users may write to {}: chmod \+t"),
        (0o770, None, r"more users may write to {}: "),
        (0o700, 65534, "; {} is that of user 65534"),
    ],
)
def test_a_place_in_which_others_can_rename_is_refused(
    fake: FakeSGLang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    owner: int | None,
    message: str,
    above: int,
) -> None:
    """The folder itself and those above it: who can rename one of them can put another in its place."""
    save(tiny_model(tied=False), tmp_path)
    before = os.umask(0o002)  # as where each user has a group
    try:
        engine = connect(fake.url, tmp_path, weights_folder=str(tmp_path / "outer/inner/shared"))
        engine.push_weights(tiny_model(tied=False).named_parameters(), 1)
    finally:
        os.umask(before)
    place = [tmp_path / "outer/inner/shared", tmp_path / "outer/inner", tmp_path / "outer"][above]
    place.chmod(mode)
    stat = Path.stat
    if owner is not None:
        values = [owner if i == 4 else each for i, each in enumerate(place.stat())]
        monkeypatch.setattr(
            Path, "stat", lambda path, **more: os.stat_result(values) if path == place else stat(path, **more)
        )
    with pytest.raises(RunFailed, match=message.format(re.escape(str(place)))):
        engine.push_weights(tiny_model(tied=False).named_parameters(), 2)
    assert fake.version == "1"
    if owner is None:
        place.chmod(0o1777)
        engine.push_weights(tiny_model(tied=False).named_parameters(), 2)


def test_weights_that_are_gathered_a_few_at_a_time(fake: FakeSGLang, tmp_path: Path) -> None:
    """As under ZeRO-3: each is gone when the next one comes."""
    model = tiny_model(tied=False)
    save(model, tmp_path)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in model.named_parameters():
            copy = weight.detach().clone().T if weight.dim() == 2 else weight.detach().clone()
            yield name, copy.T if weight.dim() == 2 else copy
            copy.fill_(float("nan"))

    connect(fake.url, tmp_path).push_weights(gathered(), 1)
    (loaded,) = fake.loaded
    assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())


def test_other_ranks_write_nothing(fake: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_model(tied=False), tmp_path)
    engine = connect(fake.url, tmp_path)
    monkeypatch.setattr(rlplus.train.rollout.sglang_engine, "rank", lambda: 1)
    gathered = []
    weights = ((gathered.append(name), (name, p))[1] for name, p in tiny_model(tied=False).named_parameters())
    engine.push_weights(weights, 1)
    assert gathered == list(dict(tiny_model(tied=False).named_parameters())), "they gather along with rank 0"
    assert fake.version == "default"
    engine.close()
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("limit", [1, 7, 40])
@pytest.mark.parametrize("stop", [(), (30,)])
def test_a_response_ends_at_the_runs_own_end_tokens(
    fake: FakeSGLang, engine: RolloutEngine, limit: int, stop: tuple[int, ...]
) -> None:
    """It goes on where the server ended it at an end token of the model's files."""
    groups = engine.generate(requests(PROMPTS, [2, 0, 3], limit), Sampling(0.7, 3, stop))
    assert [len(group) for group in groups] == [2, 0, 3]
    continued = False
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert completion.tokens == whole_response(prompt, limit, (EOS, *stop))
            assert completion.logprob == [-token / 8 for token in completion.tokens]
            assert completion.truncated == (completion.tokens[-1] not in (EOS, *stop))
            continued |= OTHER_END in completion.tokens[:-1]
    assert continued or limit < 40
    params = [p for body in fake.asked for p in body["sampling_params"]]
    first = [p for p in params if p["max_new_tokens"] == limit]
    assert len({p["sampling_seed"] for p in first}) == 5, "no two responses with one seed"
    neutral = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    assert all(p | neutral == p and p["stop_token_ids"] == [EOS, *stop] for p in params)


def test_the_longest_prompt_has_its_whole_response(engine: RolloutEngine) -> None:
    prompt = [7] * (MAX_MODEL_LEN - 5)
    (group,) = engine.generate(requests([prompt], [2], 5), Sampling(1.0, 0))
    assert [c.tokens for c in group] == [whole_response(prompt, 5)] * 2


def test_a_greedy_response_is_asked_once(fake: FakeSGLang, engine: RolloutEngine) -> None:
    (group,) = engine.generate(requests(PROMPTS[:1], [4], 1), Sampling(0.0, 0))
    assert [c.tokens for c in group] == [whole_response(PROMPTS[0], 1)] * 4
    assert [len(body["input_ids"]) for body in fake.asked] == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skip_tokenizer_init": False}, "it has a tokenizer, and with it stop strings"),
        ({"dtype": "auto"}, "its dtype is auto"),
        ({"context_length": MAX_MODEL_LEN + 5}, f"its --context-length is {MAX_MODEL_LEN + 5}"),
        ({"allow_auto_truncate": True}, "it has --allow-auto-truncate True"),
        ({"speculative_algorithm": "EAGLE"}, "it has --speculative-algorithm EAGLE"),
        ({"preferred_sampling_params": "{}"}, "it has --preferred-sampling-params {}"),
        ({"context_length": None}, "its --context-length is None"),
        ({"dtype": "bfloat16"}, "its logits are bfloat16, which the trainer's are not"),
    ],
)
def test_a_server_that_is_not_exact_is_refused(
    fake: FakeSGLang, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save(tiny_model(tied=False), tmp_path)
    fake.info |= changes
    dtype = "bfloat16" if "logits" in message else "float32"
    with pytest.raises(ValueError, match=f"want at {fake.url} a server started with: sglang serve .*; .*{message}"):
        connect(fake.url, tmp_path, dtype)
    if dtype == "bfloat16":
        fake.info["enable_fp32_lm_head"] = True
        connect(fake.url, tmp_path, dtype)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"/server_info": (404, {"detail": "Not Found"})}, "404: .*Is it a server of SGLang 0.5"),
        ({"/server_info": (200, {"vllm_config": {}})}, "0.5; GET /server_info: want skip_tokenizer_init; got none"),
        ({"/server_info": (401, {"error": "Unauthorized"})}, "Is SGLANG_API_KEY that of the server"),
        ({"/metrics": (404, "")}, "GET /metrics was answered with 404"),
        (
            {"/metrics": (200, "sglang:other 1\n")},
            "want sglang:num_used_tokens in GET /metrics, which --enable",
        ),
    ],
)
def test_what_is_no_such_server_is_refused(
    fake: FakeSGLang, tmp_path: Path, odd: dict[str, tuple[int, Any]], message: str
) -> None:
    save(tiny_model(tied=False), tmp_path)
    fake.odd = odd
    with pytest.raises(ValueError, match=message):
        connect(fake.url, tmp_path)


@pytest.mark.parametrize("status", [200, 400])
def test_a_push_that_the_server_does_not_take(
    fake: FakeSGLang, engine: RolloutEngine, tmp_path: Path, status: int
) -> None:
    """SGLang goes back to the weights before it, so that a later push is enough."""
    fake.odd["/update_weights_from_disk"] = (status, {"success": False, "message": "Failed to get weights iterator"})
    with pytest.raises(RunFailed, match=r"did not take the weights of version 2: .*Failed to get weights iterator"):
        engine.push_weights(tiny_model(tied=False).named_parameters(), 2)
    with pytest.raises(RuntimeError, match="the push of version 2 failed half-way"):
        engine.generate(requests(PROMPTS, [1, 1, 1], 4), Sampling(1.0, 0))
    del fake.odd["/update_weights_from_disk"]
    engine.push_weights(tiny_model(tied=False).named_parameters(), 3)
    assert engine.generate(requests(PROMPTS, [1, 1, 1], 4), Sampling(1.0, 0))


def test_a_folder_that_cannot_be_written_fails_the_push(fake: FakeSGLang, tmp_path: Path) -> None:
    save(tiny_model(tied=False), tmp_path)
    (tmp_path / "file").touch()
    engine = connect(fake.url, tmp_path, weights_folder=str(tmp_path / "file"))
    with pytest.raises(RunFailed, match=r"did not take the weights of version 1: .*Not a directory"):
        engine.push_weights(tiny_model(tied=False).named_parameters(), 1)


def test_answers_that_are_not_this_runs(fake: FakeSGLang, engine: RolloutEngine) -> None:
    def ask() -> None:
        engine.generate(requests(PROMPTS, [1, 1, 1], 4), Sampling(1.0, 0))

    fake.finish = "abort"
    with pytest.raises(RunFailed, match="ended a response with abort, None: want stop or length"):
        ask()
    fake.finish, fake.matched = "stop", "NaN happened"
    with pytest.raises(RunFailed, match="ended a response with stop, NaN happened"):
        ask()
    fake.finish, fake.matched, fake.version = "", None, "12"
    with pytest.raises(RunFailed, match=r"generated with the weights of \['12'\]; want those of 1\. Does another run"):
        ask()
    for drawn, changes, message in [
        *(([[-1.0, token, None], [-1.0, EOS, None]], {}, rf"token 1: want .*; got {token!r}") for token in ODD_TOKENS),
        *(
            ([[value, 5, None], [-1.0, EOS, None]], {}, "logprob 1: want 2 finite logprobs")
            for value in (None, *ODD_LOGPROBS)
        ),
        ([], {}, "without a token"),
        (None, {}, "without a token"),
        ([[-1.0, 5, None]] * 4 + [[-1.0, EOS, None]], {}, "ended a response with stop: want 4 tokens; got 5"),
        ([[-1.0, 5, None]] * 5, {"type": "length"}, "with length: want 4 tokens; got 5"),
        ([[-1.0, 5, None]] * 2, {"type": "length"}, "with length: want 4 tokens; got 2"),
        ([[-1.0, 5, None]] * 2, {}, "want the last token 5 as its reason; got 1"),
        ([[-1.0, 5, None]] * 2, {"matched": None}, "want the last token 5 as its reason; got None"),
        ([[-1.0, EOS, None], [-1.0, 5, None]], {"matched": 5}, "token 1: want nothing behind the end token 1"),
    ]:
        meta = {"finish_reason": {"type": "stop", "matched": EOS} | changes, "output_token_logprobs": drawn}
        fake.odd["/generate"] = (200, [{"meta_info": meta | {"weight_versions": [{"version": "1"}]}}])
        with pytest.raises(RunFailed, match=f"sglang at {fake.url}.*{message}"):
            ask()
    for answer, message in [
        ([], "want 1 responses; got 0"),
        ([{"meta_info": {}}], r"want \[0\].meta_info.finish_reason; got none"),
        ({"error": "no"}, "want the answer to be a list; got {'error': 'no'}"),
    ]:
        fake.odd["/generate"] = (200, answer)
        with pytest.raises(RunFailed, match=f"sglang at {fake.url}, request [012]: POST /generate: {message}"):
            ask()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "colocated", "server_url": None}, "engine sglang is a server that you started: want mode server"),
        ({"weights_folder": None}, "takes weights from weights_folder: want a folder that both can read"),
        ({"weights_folder": "~/w"}, "want it from / on; got '~/w'"),
        ({"transfer": "nccl"}, "transfer nccl is vLLM's"),
        ({"top_k": 8}, "want top_k 0; got 8"),
        ({"engine": "vllm"}, "weights_folder is for engine sglang; got vllm"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    good = {"engine": "sglang", "mode": "server", "server_url": "http://a", "weights_folder": "/w"}
    assert RolloutConfig(max_response_length=4, **good).engine == "sglang"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        RolloutConfig(max_response_length=4, **good | changes)  # type: ignore[arg-type]


needs_sglang = pytest.mark.skipif("SGLANG" not in os.environ, reason="SGLANG names no Python with SGLang 0.5")


@needs_sglang
@pytest.mark.slow
def test_the_real_server_draws_from_the_models_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    save(tiny_model(tied=True), tmp_path)
    with RealSGLang(os.environ["SGLANG"], tmp_path, tmp_path / "log", MAX_MODEL_LEN, "secret") as server:
        engine = connect(server.url, tmp_path)
        tokens: list[int] = []
        for version in (1, 2):
            model = tiny_model(tied=True, seed=version)
            engine.push_weights(model.named_parameters(), version)
            for temperature in (0.7, 1.3):
                groups = engine.generate(requests(PROMPTS, [4, 0, 4], 60), Sampling(temperature, version, (30,)))
                assert gap(model, groups, PROMPTS, temperature) <= 1e-5
                for completion in (c for group in groups for c in group):
                    assert completion.truncated == (completion.tokens[-1] not in (EOS, 30))
                    assert not {EOS, 30} & {*completion.tokens[:-1]}
                    tokens += completion.tokens[:-1]
        assert OTHER_END in tokens, "responses go on behind the other end token"
        monkeypatch.setenv("SGLANG_API_KEY", "wrong")
        with pytest.raises(ValueError, match=r"401: .*Is SGLANG_API_KEY that of the server"):
            connect(server.url, tmp_path)
        engine.close()


@needs_sglang
@pytest.mark.slow
def test_a_run_trains_on_the_real_servers_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    start = write_start(tmp_path / "start", tied=False)
    with RealSGLang(os.environ["SGLANG"], start, tmp_path / "log", 56, "secret") as server:
        served = {"engine": "sglang", "mode": "server", "server_url": server.url}
        rollout = served | {"max_response_length": 48, "weights_folder": str(tmp_path / "shared")}
        sections = {"model": {"scratch": None, "path": str(start)}, "rollout": rollout}
        rows = metrics(train(run_config(tmp_path, train={"steps": 4, "lr": 3e-3}, **sections)))
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert all(row["mismatch/max"] <= 1e-4 for row in rows), rows
