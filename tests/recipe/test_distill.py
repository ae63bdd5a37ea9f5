"""On-policy distillation: its laws, a step in float64, what it refuses, and runs with it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from recipe_cases import resumed, resumed_config
from teachers import divergence, gradients, log_probabilities, make_teacher, rollouts, sampled, trained
from tokenizers import AddedToken
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM
from update_cases import packed

from rlplus import linear_divergence, linear_logprob, linear_policy_loss
from rlplus.tools.verify import verify_run
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, Sample, byte_tokenizer
from rlplus.train.learner import Teacher
from rlplus.train.recipe import Batch, Update
from rlplus.train.recipe.teaching import DistillRecipe
from rlplus.train.trainer import Run, open_run, train

LOSSES: dict[str, dict[str, Any]] = {
    "reverse": {"loss": "reverse_kl"},
    "forward": {"loss": "forward_kl"},
    "jsd": {"loss": "jsd", "beta": 0.3},
    "sampled": {"loss": "sampled"},
}
KINDS = [name for name in LOSSES if name != "sampled"]
TEMPERATURE = 0.7


def distill(folder: Path, teacher: Path | str, output: str = "run", loss: str = "reverse", **sections: Any) -> Config:
    recipe = {"name": "distill", "teacher": str(teacher)} | LOSSES[loss]
    algorithm = {"preset": "grpo", "reduction": "token", "recipe": recipe} | sections.pop("algorithm", {})
    return run_config(folder, output, algorithm=algorithm, **sections)


def credited(run: Run, samples: list[Sample]) -> tuple[Update, list[MicroBatch]]:
    """The update after the recipe's credit, in at least two micro-batches that have a gradient."""
    run.recipe.credit(Batch([], samples, 0.0))
    return Update(samples, run.recipe.algorithm), packed(run, samples)


@pytest.mark.parametrize("loss", quick.only(("reverse", "jsd", "sampled"), LOSSES))
def test_a_step_is_the_one_in_float64(tmp_path: Path, loss: str) -> None:
    """Loss, gradient and metric, of the trained tokens of responses alone, over micro-batches that are padded."""
    teacher = make_teacher(tmp_path)
    with open_run(distill(tmp_path, teacher, loss=loss, rollout={"temperature": TEMPERATURE})) as run:
        samples = rollouts()
        update, batches = credited(run, samples)
        assert len(batches) >= 2
        assert any(batch.input_ids.numel() > batch.tokens for batch in batches)
        value, got = gradients(run, update, batches)
        student, frozen = (
            AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float64)
            for path in (run.folder.path / "scratch", teacher)
        )
        total, distance, tokens = torch.zeros((), dtype=torch.float64), 0.0, 0
        for sample in samples:
            logp = log_probabilities(student, sample.prompt, sample.response, TEMPERATURE)
            with torch.no_grad():
                logq = log_probabilities(frozen, sample.prompt, sample.response, TEMPERATURE)
            if loss == "sampled":
                advantage = (sampled(logq, sample) - sampled(logp, sample)).detach()
                each = -advantage * (sampled(logp, sample) - sampled(logp, sample).detach()).exp()
                distance -= float(advantage[trained(sample)].sum())
            else:
                each = divergence(logp, logq, LOSSES[loss]["loss"], LOSSES[loss].get("beta", 0.5))
                distance += float(each.detach()[trained(sample)].sum())
            total = total + each[trained(sample)].sum()
            tokens += int(trained(sample).sum())
        (total / tokens).backward()
        assert value == pytest.approx(float(total.detach()) / tokens, rel=1e-4)
        assert run.recipe.metrics() == {"distill/divergence": (pytest.approx(distance, rel=1e-4), tokens)}
        for name, p in student.named_parameters():
            bound = {"rtol": 1e-3, "atol": 2e-6 * float(p.grad.abs().max())}
            torch.testing.assert_close(got[name].double(), p.grad, msg=name, **bound)


@pytest.mark.parametrize("loss", quick.only(("reverse", "sampled"), LOSSES))
def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path: Path, loss: str) -> None:
    with open_run(distill(tmp_path, tmp_path / "run" / "scratch", loss=loss)) as run:
        update, batches = credited(run, rollouts())
        if loss == "sampled":
            assert all(batch.forward_only for batch in batches)
            assert not any(A for sample in update.samples for A in sample.advantage)
            return
        value, got = gradients(run, update, batches)
        assert value == pytest.approx(0, abs=1e-9)
        assert max(float(gradient.abs().max()) for gradient in got.values()) < 1e-8


def test_the_expected_gradient_of_sampled_tokens_is_the_reverse_divergences() -> None:
    """Over all tokens that may be sampled, each with its probability."""
    generator = torch.Generator().manual_seed(0)
    V, H, G = 23, 5, 7
    hidden, weight, others, theirs = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((1, H), (V, H), (1, G), (V, G))
    )
    hidden.requires_grad_(), weight.requires_grad_()
    one = torch.ones(1, dtype=torch.float64)
    want = torch.autograd.grad(
        linear_divergence(hidden, weight, others, theirs, token_weight=one).loss, (hidden, weight)
    )
    tokens = torch.arange(V)
    with torch.no_grad():
        own, teachers = (linear_logprob(h.expand(V, -1), w, tokens)[0] for h, w in ((hidden, weight), (others, theirs)))
    loss = linear_policy_loss(
        hidden.expand(V, -1), weight, tokens, objective="grpo", advantage=teachers - own, token_weight=own.exp(),
        old_logprob=None,
        external=torch.zeros(V, dtype=torch.bool),
    ).loss  # fmt: skip
    for got, expected in zip(torch.autograd.grad(loss, (hidden, weight)), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", ["reverse", "jsd"])
def test_a_divergence_takes_a_sampled_backward_pass(tmp_path: Path, loss: str) -> None:
    """The exact gradient below all elements; another one with a large threshold, and the same when it is repeated."""
    teacher, found = make_teacher(tmp_path), {}
    for name, section in {
        "exact": {},
        "all": {"backward": "sampled", "backward_threshold": 1e-12},
        "few": {"backward": "sampled", "backward_threshold": 0.005},
        "again": {"backward": "sampled", "backward_threshold": 0.005},
    }.items():
        with open_run(distill(tmp_path, teacher, name, loss, train=section)) as run:
            found[name] = torch.cat([x.flatten() for x in gradients(run, *credited(run, rollouts()))[1].values()])
    exact = found["exact"]
    torch.testing.assert_close(found["all"], exact, rtol=1e-4, atol=1e-6)
    assert 0.01 < (found["few"] - exact).norm() / exact.norm() < 1
    assert torch.equal(found["few"], found["again"])


def test_rows_of_the_teachers_head_that_are_no_token_do_not_count(tmp_path: Path) -> None:
    """A head that is padded further than the policy's is the one without these rows."""
    teacher = make_teacher(tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(str(teacher))
    lm.resize_token_embeddings(320)
    with torch.no_grad():
        lm.get_output_embeddings().weight[258:] = 9.0
    padded = tmp_path / "padded"
    lm.save_pretrained(str(padded))
    byte_tokenizer().save_pretrained(str(padded))
    found = []
    with open_run(distill(tmp_path, teacher)) as run:
        for path in (teacher, padded):
            run.recipe.teacher = Teacher(str(path), run.policy, str(run.folder.path / "scratch"))
            update, batches = credited(run, rollouts())
            logprobs = [run.recipe.teacher.logprob(batch) for batch in batches]
            found.append((gradients(run, update, batches)[0], float(torch.cat(logprobs).sum())))
            with pytest.raises(ValueError, match=r"want the teacher that the run began with; .* has other weights"):
                run.recipe.restore("another's")
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path) -> None:
    other, small, short = (make_teacher(tmp_path, name) for name in ("other", "small", "short"))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=True)])
    tokenizer.save_pretrained(str(other))
    make_teacher(tmp_path, "small", vocab_size=200, pad_token_id=None, eos_token_id=None)
    make_teacher(tmp_path, "short", max_position_embeddings=15)
    for path, text in (
        (other, r"has the policy's tokens; the one of \S+other differs in 1, the first is '<think>' \(258\)"),
        (small, r"want a head with at least the policy's 258 rows; \S+small has 200"),
        (short, r"want a model with 16 positions, for prompt and response; \S+short has 15"),
        (tmp_path / "none", r"want algorithm.recipe.teacher a Hugging Face folder or hub name; got '\S+none'"),
    ):
        with pytest.raises(ValueError, match=text), open_run(distill(tmp_path, path)):
            pass


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": {"recipe": {"name": "distill"}}}, "want algorithm.recipe.teacher, a Hugging Face folder"),
        ({"algorithm": {"preset": "rlplus"}}, "want sft, or a preset without demonstrations; got rlplus"),
        ({"train": {"sequence_parallel": 2}}, "does not support train.sequence_parallel > 1; got 2"),
        ({"rollout": {"top_k": 5}}, "want rollout.top_k 0; got 5"),
        ({"algorithm": {"objective": {"kl_coef": 0.1}}}, "reverse_kl does not support algorithm.objective.kl_coef"),
        ({"algorithm": {"top_entropy": 0.2}}, "reverse_kl does not support algorithm.top_entropy"),
        ({"algorithm": {"shaping": {"wrong": -1.0}}}, "reverse_kl does not support algorithm.shaping"),
        ({"algorithm": {"normalize_std": False}}, "normalize_std would have no effect"),
        ({"train": {"backend": "cpp"}}, "reverse_kl does not support train.backend cpp"),
        ({"train": {"shard_head": True, "zero_stage": 3}}, "reverse_kl does not support train.shard_head"),
        ({"algorithm": {"recipe": {"name": "distill", "teacher": "x", "beta": 0.1}}}, "beta belongs to loss jsd"),
    ],
)
def test_settings_without_use_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        distill(tmp_path, "somewhere", **changes)


def test_the_objective_of_sampled_tokens_is_the_runs(tmp_path: Path) -> None:
    config = distill(
        tmp_path, "x", loss="sampled", algorithm={"objective": {"kl_coef": 0.1}}, train={"backward": "sampled"}
    )
    assert config.algorithm.resolve().needs_reference


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reverse", "sampled"])
def test_a_run_resumes_bit_for_bit_and_with_no_other_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    teacher = make_teacher(tmp_path)
    algorithm = {"preset": "grpo", "recipe": {"name": "distill", "teacher": str(teacher)} | LOSSES[loss]}
    rows = resumed(tmp_path, monkeypatch, algorithm, DistillRecipe)
    assert all(row["actor/grad_norm"] > 0 and row["mismatch/mean"] < 1e-5 for row in rows)
    shutil.rmtree(teacher)
    make_teacher(tmp_path, seed=8)
    with pytest.raises(ValueError, match=r"want the teacher that the run began with; \S+teacher has other weights"):
        train(resumed_config(tmp_path, "parts", algorithm, steps=21), resume="newest")


@pytest.mark.parametrize("loss", quick.only(("reverse",), KINDS))
def test_the_policy_comes_near_to_its_teacher(tmp_path: Path, loss: str) -> None:
    """Repeated updates on one batch."""
    with open_run(distill(tmp_path, make_teacher(tmp_path), loss=loss, train={"lr": 1e-2})) as run:
        found = []
        for _ in range(12):
            update, batches = credited(run, rollouts())
            run.recipe.accumulate(update, batches)
            run.policy.step()
            total, tokens = run.recipe.metrics()["distill/divergence"]
            found.append(total / tokens)
    assert found[-1] < 0.7 * found[0]


def test_a_step_by_sampled_tokens_is_verified_and_another_loss_refused(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path)
    sections: dict[str, Any] = {"train": {"steps": 1}, "checkpoint": {"every": 1}}
    verified = verify_run(train(distill(tmp_path, teacher, "sampled", loss="sampled", **sections)))
    assert verified.wrong == []
    assert "the advantages, which come from the recipe" in verified.notes
    with pytest.raises(ValueError, match=r"want a run whose loss is its objective's; .* its recipe's, reverse_kl"):
        verify_run(train(distill(tmp_path, teacher, "whole", **sections)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({"lora": {"rank": 4, "alpha": 8.0}}, {}),
        ({"dtype": "bfloat16"}, {"zero_stage": 1}),
        ({"dtype": "bfloat16"}, {"zero_stage": 2}),
        ({"dtype": "bfloat16"}, {"zero_stage": 3}),
        ({}, {"backend": "reference"}),
    ],
)
def test_a_run_of_every_kind(tmp_path: Path, model: dict[str, Any], changes: dict[str, Any]) -> None:
    """Beside the one that float64 judges: the same divergence in the first step, within the dtype's rounding."""
    teacher = make_teacher(tmp_path)
    scratch = run_config(tmp_path).model.scratch
    assert scratch is not None
    first = []
    for output, part, train_section in (("plain", {}, {}), ("other", model, changes)):
        sections = {"model": {"scratch": scratch.model_dump()} | part, "train": train_section | {"steps": 2}}
        rows = metrics(train(distill(tmp_path, teacher, output, **sections)))
        assert all(row["actor/grad_norm"] > 0 for row in rows)
        first.append(rows[0]["distill/divergence"])
    assert first[1] == pytest.approx(first[0], rel=0.1)
