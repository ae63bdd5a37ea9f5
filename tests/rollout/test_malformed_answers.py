"""Answers of servers that are damaged anywhere: each is one line with server, request and field, or means the same."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import resumed_config
from rollout_models import EOS, MAX_MODEL_LEN, PAD, PROMPTS, requests, save, tiny_model
from servers import FakeServer, connect
from sglang_servers import FakeSGLang
from teacher_servers import TeacherServer, serving
from teachers import make_teacher, rollouts

from rlplus.common.errors import SharedFailure
from rlplus.train.config import RolloutConfig
from rlplus.train.recipe import Batch
from rlplus.train.rollout import Completion, RolloutEngine, RunFailed, Sampling, make_engine
from rlplus.train.trainer import open_run

ODD: list[Any] = [None, "x", [], {}, True, 7.5, [None], {"a": None}, 10**400, False]
GONE = object()
Place = tuple[str | int, ...]
# Words for a field in a line that speaks of its values; and members that no engine reads.
WORDS = {
    "token_ids": ("token",),
    "output_token_logprobs": ("token", "logprob"),
    "token_id": ("token",),
    "matched": ("finish_reason",),
    "type": ("finish_reason",),
    "content": ("logprobs",),
    "version": ("weight_versions",),
}
UNREAD = {"output_ids", "start", "end"}


def damaged(answer: Any, path: Place = (), odds: Sequence[Any] = ODD) -> Iterator[tuple[Place, Any]]:
    """The answer with one value replaced or missing, at every level, and the place of that value."""
    for odd in odds:
        if type(odd) is not type(answer) or odd in ([], {}):
            yield path, odd
    members = answer.items() if isinstance(answer, dict) else enumerate(answer) if isinstance(answer, list) else ()
    for key, value in members:
        rest = [(place, changed) for place, changed in damaged(value, (*path, key), odds)]
        for place, changed in [*rest, ((*path, key), GONE)] if isinstance(answer, dict) else rest:
            whole = copy.copy(answer)
            if changed is GONE:
                del whole[key]
            else:
                whole[key] = changed
            yield place, whole


def names_of(path: Place) -> tuple[str, ...]:
    """Texts of which one must be in the line about this place."""
    name = next((key for key in reversed(path) if isinstance(key, str)), "")
    return (name, *WORDS.get(name, ()))


def check(line: str, server: str, request: str, path: Place) -> None:
    assert server in line, (path, line)
    assert request in line, (path, line)
    assert "\n" not in line, (path, line)
    assert len(line) < 3000, (path, line)
    assert any(name in line for name in names_of(path)), (path, line)


def texts(good: bytes) -> list[bytes]:
    """Bodies that are no JSON: cut anywhere, in another charset, too deep."""
    cut = [good[:length] for length in range(0, len(good), 1 + len(good) // 80)]
    charset = [good.decode().encode("cp037"), good[:-1] + b"\xe9\xff" + good[-1:], good.replace(b'"', b"\xff", 1)]
    return [*cut, *charset, b"[" * 100_000, b"9" * 5000, b"\x00" + good, good + good]


class Asked:
    """An engine on a stand-in, whose answer to the one request that is asked can be set."""

    def __init__(self, engine: RolloutEngine, fake: Any, path: str, good: Any) -> None:
        self.engine, self.fake, self.path, self.good = engine, fake, path, good

    def answered(self, answer: Any) -> Completion:
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.fake.odd[self.path] = (200, text) if isinstance(self.fake, FakeSGLang) else text
        (completion,) = self.engine.generate(requests(PROMPTS[:2], [0, 1], 4), Sampling(1.0, 0))[1]
        return completion


@pytest.fixture(params=["vllm", "sglang"])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Asked]:
    save(model := tiny_model(tied=False), tmp_path)
    fake: Any = FakeServer() if request.param == "vllm" else FakeSGLang()
    spans = [{"version": "1", "start": 0, "end": 2}]
    if request.param == "vllm":
        engine, path = connect(fake.url, tmp_path), "/inference/v1/generate"
        told = [{"token_id": token, "logprob": -0.25} for token in (5, EOS)]
        choice = {"index": 0, "token_ids": [5, EOS], "finish_reason": "stop", "logprobs": {"content": told}}
        good: Any = {"choices": [choice | {"weight_versions": spans}]}
    else:
        config: dict[str, Any] = {"engine": "sglang", "mode": "server", "server_url": fake.url}
        lengths: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "end_ids": [EOS], "pad_token_id": PAD}
        config |= {"weights_folder": str(tmp_path / "shared"), "max_response_length": 16}
        engine = make_engine(RolloutConfig(**config), str(tmp_path), dtype="float32", seed=0, **lengths)
        path, drawn = "/generate", [[-0.25, 5, None], [-0.25, EOS, None]]
        meta = {"finish_reason": {"type": "stop", "matched": EOS}, "output_token_logprobs": drawn}
        good = [{"output_ids": [5], "meta_info": meta | {"weight_versions": spans}}]
    engine.push_weights(model.named_parameters(), 1)
    yield Asked(engine, fake, path, good)
    engine.close()
    fake.http.shutdown()
    fake.http.server_close()


def test_a_damaged_answer_is_one_line_with_its_field(asked: Asked) -> None:
    good = asked.answered(asked.good)
    refused = 0
    for path, answer in damaged(asked.good):
        try:
            completion = asked.answered(answer)
        except RunFailed as error:
            check(str(error), asked.fake.url, "request 1", path)
            refused += 1
        else:
            unread = names_of(path)[0] in UNREAD or path[-1:] == (2,)  # a token's text
            equal = path[-1:] == ("matched",) or path[-1:] == ("token_id",)  # true, which is 1 in Python
            assert (completion, unread or equal) == (good, True), (path, answer)
    assert refused > 100


def test_a_text_that_is_no_json_is_one_line(asked: Asked) -> None:
    good = json.dumps(asked.good).encode()
    for text in texts(good):
        with pytest.raises(RunFailed, match=r"want JSON; got") as error:
            asked.answered(text)
        check(str(error.value), asked.fake.url, f"request 1: POST {asked.path}", ())


def test_a_damaged_description_of_the_server_is_one_line(asked: Asked, tmp_path: Path) -> None:
    """Settings that only say what is off may be missing; nothing else than a refusal comes of the others."""
    place = {"weights_folder": str(tmp_path / "shared")} if isinstance(asked.fake, FakeSGLang) else {}
    config = {"engine": "sglang" if place else "vllm", "mode": "server", "server_url": asked.fake.url} | place
    sizes: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "end_ids": [EOS], "pad_token_id": PAD}
    good = asked.fake.info if place else {"vllm_config": asked.fake.info}
    gauge = "sglang:num_used_tokens" if place else "vllm:generation_tokens_total"
    cases = [("/server_info", *case) for case in damaged(good, odds=ODD[:4])]
    cases += [("/metrics", (gauge,), f"{gauge} {value}\n".encode()) for value in ("x", "NaN", "+Inf", "1,0", "0x10")]
    taken, refused = 0, 0
    for path, names, answer in cases:
        asked.fake.odd = {path: (200, answer) if place else answer}
        try:
            settings = RolloutConfig(max_response_length=16, **config)
            make_engine(settings, str(tmp_path), dtype="float32", seed=0, **sizes).close()
        except ValueError as error:
            said = str(error)
            refused += said.startswith(f"want at {asked.fake.url} a server started with: ")
        else:
            assert path == "/server_info", answer
            assert names_of(names)[0] in ("enable_fp32_lm_head", "device"), (names, answer)
            taken += 1
    assert refused == len(cases) - taken > taken


def test_a_teachers_damaged_answer_is_one_line(tmp_path: Path) -> None:
    with serving(TeacherServer(make_teacher(tmp_path))) as server:
        algorithm = {"preset": "grpo", "recipe": {"name": "distill", "teacher_url": server.url, "teacher_topk": 2}}
        with open_run(resumed_config(tmp_path, "run", algorithm)) as run:
            (sample, *_) = rollouts()
            length = len(sample.prompt) + len(sample.response)
            sample.response = [5] * len(sample.response)
            place = {"5": {"logprob": -0.5}, "6": {"logprob": -2.0}, "7": {"logprob": -3.0}}
            good = {"choices": [{"prompt_logprobs": [None, *[place] * (length - 1)]}]}
            cases = [*damaged(good, odds=ODD[:2]), *(((), text) for text in texts(json.dumps(good).encode()))]
            refused = 0
            for path, answer in cases:
                server.odd["/v1/completions"] = answer
                try:
                    run.recipe.credit(Batch([], [sample], 0.0))
                except SharedFailure as error:
                    named = () if not isinstance(path[-1:], str) else path
                    check(str(error), server.url, "POST /v1/completions", named)
                    refused += 1
                else:
                    before = path[:4] in {("choices", 0, "prompt_logprobs", at) for at in range(len(sample.prompt))}
                    assert before, (path, answer)
            assert refused > 100
