"""Distillation from a teacher on a server: a step in float64, resume, and servers that cannot teach."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from recipe_cases import resumed, resumed_config
from servers import Server
from teacher_servers import TeacherServer, serving
from teachers import divergence, gradients, log_probabilities, make_teacher, rollouts, sampled, trained
from tokenizers import AddedToken
from torch import Tensor
from trainer_runs import by_torchrun, environment, metrics, on_ranks, run_config
from transformers import AutoModelForCausalLM
from update_cases import packed

from rlplus.common.errors import SharedFailure
from rlplus.train.config import Config
from rlplus.train.config.surroundings import surroundings
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.teacher import _loss_op
from rlplus.train.recipe import Batch, Update
from rlplus.train.recipe.teaching import DistillRecipe
from rlplus.train.trainer import open_run, train

COMPLETIONS = "/v1/completions"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TeacherServer]:
    with serving(TeacherServer(make_teacher(tmp_path))) as teacher:
        yield teacher


def distill(folder: Path, url: str, output: str = "run", recipe: dict[str, Any] | None = None, **more: Any) -> Config:
    algorithm = {"preset": "grpo", "reduction": "token"}
    options = {"name": "distill", "teacher_url": url} | (recipe or {})
    return run_config(folder, output, algorithm=algorithm | {"recipe": options}, **more)


def opened(config: Config) -> None:
    with open_run(config):
        pass


def classes(logp: Tensor, tokens: Tensor) -> Tensor:
    """log of the probabilities of these tokens (T, k), and of all others as one."""
    p = logp.exp()
    rest = p.scatter(1, tokens, 0.0).sum(1, keepdim=True)
    return torch.cat([p.gather(1, tokens), rest], 1).log()


@pytest.mark.parametrize(("loss", "k"), [("reverse_kl", 3), ("forward_kl", 16), ("jsd", 3), ("sampled", 0)])
def test_a_step_is_the_one_in_float64(tmp_path: Path, server: TeacherServer, loss: str, k: int) -> None:
    """The divergence of the teacher's k likeliest tokens and all others as one, of the trained tokens alone."""
    recipe = {"loss": loss} | ({"teacher_topk": k} if k == 3 else {})
    with open_run(distill(tmp_path, server.url, recipe=recipe)) as run:
        samples = rollouts()
        run.recipe.credit(Batch([], samples, 0.0))
        first, *asked = server.asked[COMPLETIONS]
        assert first["prompt"] == [0, 0], "whether it answers is known before the first step"
        assert sorted(body["prompt"] for body in asked) == sorted([*s.prompt, *s.response] for s in samples)
        assert {(body["prompt_logprobs"], body["max_tokens"]) for body in asked} == {(math.ceil(1.25 * k), 1)}
        value, got = gradients(run, Update(samples, run.recipe.algorithm), packed(run, samples))
        path = str(run.folder.path / "scratch")
        student = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            logp = log_probabilities(student, sample.prompt, sample.response, 1.0)
            with torch.no_grad():
                logq = log_probabilities(server.lm, sample.prompt, sample.response, 1.0)
            if loss == "sampled":
                own = sampled(logp, sample)
                each = -(sampled(logq, sample) - own).detach() * (own - own.detach()).exp()
            else:
                likeliest = logq.topk(k).indices
                each = divergence(classes(logp, likeliest), classes(logq, likeliest), loss)
            total, tokens = total + each[trained(sample)].sum(), tokens + int(trained(sample).sum())
        (total / tokens).backward()
        assert value == pytest.approx(float(total.detach()) / tokens, rel=1e-4)
        for name, p in student.named_parameters():
            bound = {"rtol": 1e-3, "atol": 2e-6 * float(p.grad.abs().max())}
            torch.testing.assert_close(got[name].double(), p.grad, msg=name, **bound)
    assert len(server.asked[COMPLETIONS]) == 1 + len(samples), "each response is asked about once"


def test_a_run_resumes_bit_for_bit_and_with_no_other_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: TeacherServer
) -> None:
    algorithm: dict[str, Any] = {"preset": "grpo", "recipe": {"name": "distill", "teacher_url": server.url}}
    rows = resumed(tmp_path, monkeypatch, algorithm, DistillRecipe, steps=8)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    with serving(TeacherServer(server.path)) as moved:
        before = surroundings(resumed_config(tmp_path, "parts", algorithm))
        algorithm["recipe"]["teacher_url"] = moved.url
        assert surroundings(resumed_config(tmp_path, "parts", algorithm)) == before, (
            "another address is no other preset"
        )
        train(resumed_config(tmp_path, "parts", algorithm, steps=9), resume="newest")
        moved.path = tmp_path / "another"
        with pytest.raises(ValueError, match=rf"the run began with; the teacher at {moved.url} is \S+another, not \S+"):
            train(resumed_config(tmp_path, "parts", algorithm, steps=10), resume="newest")


def test_a_server_that_fails_ends_the_run_which_goes_on_from_there(tmp_path: Path, server: TeacherServer) -> None:
    whole = distill(tmp_path, server.url, "whole", train={"steps": 2})
    parts = distill(tmp_path, server.url, "parts", train={"steps": 2})
    train(whole)
    answered, real = [0], server.answer

    def failing(path: str, body: dict[str, Any]) -> Any:
        answered[0] += path == COMPLETIONS
        return (500, {"error": {"message": "out of memory"}}) if answered[0] > 1 + 16 + 3 else real(path, body)

    server.answer = failing  # type: ignore[method-assign]
    with pytest.raises(
        SharedFailure, match=rf"the teacher at {server.url} did not answer: rank 0: POST {COMPLETIONS} .*"
    ):
        train(parts)
    server.answer = real  # type: ignore[method-assign]
    train(parts, resume="newest")
    assert metrics(Path(parts.output_dir)) == metrics(Path(whole.output_dir))


RANKS = """
import sys
import torch.distributed as dist
from rlplus.train.config import load_config
from rlplus.train.recipe import Batch, Update
from rlplus.train.trainer import open_run
from rlplus.common.agree import initialize_distributed
from teachers import rollouts
from update_cases import packed

initialize_distributed()
with open_run(load_config(sys.argv[1])) as run:
    samples = rollouts()
    if dist.get_world_size() > 1:  # one rank has almost all, and they are shared out
        samples = samples[1:] if dist.get_rank() == 0 else samples[:1]
    run.recipe.credit(Batch([], samples, 0.0))
    run.recipe.accumulate(Update(samples, run.recipe.algorithm), packed(run, samples))
    print("TOTAL", *run.recipe.metrics()["distill/divergence"], flush=True)
dist.barrier()
"""


@pytest.mark.slow
def test_two_ranks_ask_about_their_own_samples_and_fail_together(tmp_path: Path, server: TeacherServer) -> None:
    path, script = tmp_path / "run.yaml", tmp_path / "ranks.py"
    path.write_text(distill(tmp_path, server.url).to_yaml())
    script.write_text(RANKS)
    found = []
    for ranks in (1, 2):
        said = on_ranks(script, path, ranks=ranks)
        parts = [line.split()[1:] for line in said.splitlines() if line.startswith("TOTAL")]
        assert len(parts) == ranks
        found.append([sum(map(float, column)) for column in zip(*parts, strict=True)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    prompts = [tuple(body["prompt"]) for body in server.asked[COMPLETIONS] if body["prompt"] != [0, 0]]
    assert set(Counter(prompts).values()) == {2}, "each sample once in each run"
    failed, real = (500, {"error": {"message": "out of memory"}}), server.answer
    server.answer = lambda path, body: failed if body.get("prompt", [0, 0]) != [0, 0] else real(path, body)  # type: ignore[method-assign]
    done = processes.run(by_torchrun("-m", "rlplus", "train", path), env=environment())
    assert done.returncode != 0
    assert re.search("did not answer: rank 0: .*out of memory.*; rank 1: .*out of memory", done.stderr)


ODD: list[tuple[str, Any, str]] = [
    (
        "/v1/models",
        (404, {"message": "Not Found"}),
        "want at {url} a server started with: vllm serve MODEL; GET /v1/mod",
    ),
    ("/v1/models", {"data": []}, "want at {url} a server .*; GET /v1/models: want data\\[0\\]; got none"),
    (
        COMPLETIONS,
        (400, {"error": {"message": "greater than max allowed: 10"}}),
        "want at {url} .*greater than max allow",
    ),
    ("/v1/models", {"data": [{"id": "teacher", "root": "x", "max_model_len": 16}]}, "want --max-model-len 17 or more"),
    (
        "/detokenize",
        {"prompt": "other"},
        "whose tokenizer has the policy's tokens; the teacher at {url} reads other texts",
    ),
]


@pytest.mark.parametrize(("path", "answer", "text"), ODD)
def test_a_server_that_cannot_teach_is_refused(
    tmp_path: Path, server: TeacherServer, path: str, answer: Any, text: str
) -> None:
    server.odd[path] = answer
    with pytest.raises(ValueError, match=text.format(url=server.url)):
        opened(distill(tmp_path, server.url))


def test_no_server_is_an_error_with_the_key_and_what_to_start(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(ValueError, match=rf"teacher_url: want at {url} a server .*; GET /v1/models: Conn"):
        opened(distill(tmp_path, url))
    with pytest.raises(
        ValueError, match=r"want algorithm.recipe.teacher_url such as http://localhost:8000; got http://a..b:8"
    ):
        opened(distill(tmp_path, "http://a..b:8"))


def test_other_tokens_are_found_by_reading_them(tmp_path: Path) -> None:
    other, tokenizer = make_teacher(tmp_path, "other"), byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=True)])
    with serving(TeacherServer(other, longest=64)) as server:
        server.tokenizer = tokenizer
        opened(distill(tmp_path, server.url))  # the teacher may know more tokens
        read = server.tokenizer.decode
        server.tokenizer = type("Other", (), {"decode": lambda _, tokens: read([*reversed(tokens)])})()
        with pytest.raises(ValueError, match="reads other texts in those from 0 to 62"):
            opened(distill(tmp_path, server.url, "other tokens"))


TOLD = r"choices\[0\].prompt_logprobs: want vLLM's"
PLACE = {"logprob": -0.5, "rank": 1}
WRONG = [
    ({"5": PLACE}, "1 likeliest tokens; want 3"),
    ({"5": PLACE, "6": {"logprob": -0.6}, "7": {"logprob": -2.0}}, "numbers that are no logprobs"),
    ({"5": PLACE, "999": {"logprob": -3.0}, "998": {"logprob": -3.0}}, "3 tokens, of which the policy's head has 1"),
    ({"5": {"logprob": math.nan}, "6": PLACE, "7": {"logprob": -3.0}}, "numbers that are no logprobs"),
    ({"7": PLACE, "6": {"logprob": -3.0}, "8": {"logprob": -3.0}}, "got KeyError"),
    ({"5": {"logprob": -1.0}, "6": {"logprob": 800.0}, "7": PLACE}, "got OverflowError"),
    (None, "got AttributeError"),
    ([1], "got AttributeError"),
]


@pytest.mark.parametrize(("place", "text"), WRONG)
def test_an_answer_that_is_no_distribution_ends_the_run(
    tmp_path: Path, server: TeacherServer, place: Any, text: str
) -> None:
    with open_run(distill(tmp_path, server.url, recipe={"teacher_topk": 2})) as run:
        (sample, *_) = rollouts()
        sample.response = [5] * len(sample.response)
        places = [None, *[place] * (len(sample.prompt) + len(sample.response) - 1)]
        server.odd[COMPLETIONS] = {"choices": [{"prompt_logprobs": places}]}
        with pytest.raises(SharedFailure, match=f"did not answer: rank 0: POST {COMPLETIONS}: {TOLD} of .*{text}"):
            run.recipe.credit(Batch([], [sample], 0.0))
        server.odd[COMPLETIONS] = {"choices": [{"prompt_logprobs": places[:-1]}]}
        with pytest.raises(SharedFailure, match=f"did not answer: rank 0: POST {COMPLETIONS}: {TOLD}"):
            run.recipe.credit(Batch([], [sample], 0.0))


def test_rows_of_the_servers_head_that_are_no_token_are_passed_over(tmp_path: Path, server: TeacherServer) -> None:
    with open_run(distill(tmp_path, server.url, recipe={"teacher_topk": 2})) as run:
        (sample, *_) = rollouts()
        sample.response = [7] * len(sample.response)
        place = {"300": {"logprob": -0.5}, "5": {"logprob": -2.0}, "6": {"logprob": -2.5}, "7": {"logprob": -9.0}}
        places = [None, *[place] * (len(sample.prompt) + len(sample.response) - 1)]
        server.odd[COMPLETIONS] = {"choices": [{"prompt_logprobs": places}]}
        run.recipe.credit(Batch([], [sample], 0.0))
        tokens, logprobs = sample.teacher_topk
        assert tokens.tolist() == [[5, 6]] * len(sample.response)
        assert logprobs.tolist() == [[-2.0, -2.5]] * len(sample.response)
        assert run.recipe.teacher.logprobs([sample])[0].tolist() == [-9.0] * len(sample.response)


def test_a_backend_without_such_a_divergence_is_not_asked_for_it(tmp_path: Path, server: TeacherServer) -> None:
    """On a GPU the policy's is triton."""
    with open_run(distill(tmp_path, server.url)) as run:
        samples = rollouts()
        run.recipe.credit(Batch([], samples, 0.0))
        found = []
        for backend in ("torch", "cpp", "triton"):
            run.policy.backend = backend
            batches = packed(run, samples)
            operation = _loss_op(run.policy, run.recipe.teacher.head, {"kind": "reverse_kl", "beta": None}, batches[0])
            run.policy.backend = "torch"
            found.append(float(run.policy.engine(batches[0], operation).loss.detach()))
        assert found == [found[0]] * 3


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"teacher": "x"},
        {},
        "or teacher_url, the address of a server, .*; got teacher and teacher_url",
    ),
    ({}, {"rollout": {"temperature": 0.7}}, "want rollout.temperature 1 with teacher_url; got 0.7"),
    ({"teacher_url": None, "teacher": "x", "teacher_topk": 5}, {}, "teacher_topk belongs to teacher_url or data"),
    ({"loss": "sampled", "teacher_topk": 5}, {}, "or data.teacher_topk, with a divergence"),
    ({"teacher_topk": 0}, {}, "greater than or equal to 1"),
    ({"teacher_url": "nowhere"}, {}, "teacher_url\n  String should match pattern"),
]


@pytest.mark.parametrize(("recipe", "sections", "text"), REFUSED)
def test_settings_without_use_are_refused(
    tmp_path: Path, recipe: dict[str, Any], sections: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        distill(tmp_path, "http://x", recipe=recipe, **sections)


@pytest.mark.slow
def test_the_real_server_tells_what_the_teacher_computes(tmp_path: Path) -> None:
    """vLLM itself, in fp32, on the CPU."""
    heads = {"hidden_size": 64, "initializer_range": 0.2}  # heads are 32 wide, as vLLM wants them there
    teacher = make_teacher(tmp_path, **heads)
    plain = dict.fromkeys(
        ("tokens_only", "skip_tokenizer_init", "logprobs_mode", "weight_transfer_config", "worker_extension_cls")
    )
    with Server(teacher, tmp_path / "log", 64, **plain) as server:
        lm = AutoModelForCausalLM.from_pretrained(str(teacher), dtype=torch.float64)
        with open_run(distill(tmp_path, server.url)) as run:
            samples = rollouts()
            run.recipe.credit(Batch([], samples, 0.0))
            own = run.recipe.teacher.logprobs(samples)
            for sample, logprob in zip(samples, own, strict=True):
                with torch.no_grad():
                    logq = log_probabilities(lm, sample.prompt, sample.response, 1.0)
                torch.testing.assert_close(logprob.double(), sampled(logq, sample), rtol=0, atol=2e-5)
                want, (tokens, logprobs) = logq.topk(16), sample.teacher_topk
                torch.testing.assert_close(logprobs.double(), want.values, rtol=0, atol=2e-5)
                torch.testing.assert_close(logq.gather(1, tokens.long()), want.values, rtol=0, atol=2e-5)
        rows = metrics(train(distill(tmp_path, server.url, "trained", recipe={"loss": "sampled"})))
        assert all(row["actor/grad_norm"] > 0 for row in rows)
