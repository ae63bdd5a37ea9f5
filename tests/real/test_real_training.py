"""smollm2-135m-instruct in bf16, as a user has it: init, train, resume, verify, report, eval; rollouts by vLLM."""

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from real_runs import FAR, NEAR, Text, evaluate, init, load, logprobs, overrides, sampled, short_run
from safetensors.torch import load_file
from torch import Tensor
from trainer_runs import metrics
from transformers import AutoTokenizer

from rlplus.tools.cli import main
from rlplus.train.data import KeptSample, Sample
from rlplus.train.data.sample_store import read_kept
from rlplus.train.learner.batch import even_batches
from rlplus.train.trainer import open_run
from rlplus.train.trainer.loop import train_step

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(scope="module")
def folder(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration that `rlplus init` writes, and "whole", a run of two steps of it; removed, being gigabytes."""
    folder = tmp_path_factory.mktemp("real")
    assert main(["train", str(init(folder, smollm2, 4)), *overrides(folder / "whole")]) == 0
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def base(smollm2: str) -> Any:
    return load(smollm2, "bfloat16")


@pytest.fixture(scope="module")
def wide(smollm2: str) -> Any:
    """The same weights, computing in fp32."""
    return load(smollm2, "float32")


class Resumed(NamedTuple):
    """A run that went on from the first step, with the weights of the second.

    texts, engine: responses of its engine, and the engine's logprobs of their tokens. gap: as its probe found it.
    rounding: of these logprobs, as the trainer measures it.
    """

    texts: list[Text]
    engine: Tensor
    gap: float
    rounding: Tensor


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Resumed:
    shutil.copytree(folder / "whole", folder / "parts", ignore=shutil.ignore_patterns("step-000002", "model"))
    config = short_run(folder / "run.yaml", folder / "parts")
    with open_run(config, resume="step-000001") as run:
        train_step(run)
        run.engine.sync(2, probe=True)
        texts, engine = sampled(run, seed=5)
        samples = [Sample(*text, group, False, False, None) for group, text in enumerate(texts)]
        weights = [torch.ones(len(response)) for _, response in texts]
        batches = even_batches(samples, weights, run.config, run.pad_id, run.policy.device)
        rounding = torch.cat([run.policy.rounding(batch) for batch in batches])
        gap = run.engine.gap
        run.conclude()
    return Resumed(texts, engine, gap, rounding)


def kept(folder: Path, step: int) -> list[KeptSample]:
    return read_kept(folder / f"samples/step-{step:06d}.parquet")


def test_the_first_step_is_that_of_the_pretrained_model(folder: Path, smollm2: str, base: Any, wide: Any) -> None:
    """The run's numbers for sampled and demonstrated tokens, against transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    samples, row = kept(folder / "whole", 1), metrics(folder / "whole")[0]
    assert Counter(sample.external[0] for sample in samples) == {True: 4, False: 12}
    assert all((s.tokens[-1] == "<|im_end|>") != s.truncated for s in samples)
    ids = [(tokenizer(s.prompt).input_ids, tokenizer("".join(s.tokens)).input_ids) for s in samples]
    canonical = [len(response) == len(s.tokens) for s, (_, response) in zip(samples, ids, strict=True)]
    assert sum(canonical) >= 12  # the model may sample a text in other tokens than the tokenizer's
    samples, texts = [*compress(samples, canonical)], [*compress(ids, canonical)]
    own = torch.tensor([value for s in samples for value in s.logprob], dtype=torch.float64)
    external = torch.tensor([each for s in samples for each in s.external])
    narrow, exact = logprobs(base, texts), logprobs(wide, texts)
    rounding = (narrow - exact).abs().mean()
    assert (own - exact).abs().mean() < NEAR * rounding
    assert row["actor/prob_external"] == pytest.approx(float(exact[external].exp().mean()), abs=float(rounding))
    assert row["mismatch/mean"] < NEAR * rounding
    assert row["actor/updated"] == 1
    assert [s.reward for s in samples if s.external[0]] == [1.0] * 4


def test_a_resumed_run_has_the_same_bits(folder: Path, resumed: Resumed) -> None:
    one, other = (load_file(folder / name / "model/model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert metrics(folder / "whole") == metrics(folder / "parts")
    assert kept(folder / "whole", 2) == kept(folder / "parts", 2)


def test_the_engine_has_the_weights_of_the_last_push(folder: Path, base: Any, resumed: Resumed) -> None:
    """Its logprobs are the written model's within its own rounding, and not the old model's."""
    model = folder / "whole/model"
    new, wide = (logprobs(load(model, dtype), resumed.texts) for dtype in ("bfloat16", "float32"))
    rounding, gap = (new - wide).abs().mean(), (resumed.engine - new).abs().mean()
    stale = (resumed.engine - logprobs(base, resumed.texts)).abs().mean()
    assert gap < NEAR * rounding
    assert stale > FAR * rounding
    assert 0 < resumed.gap < NEAR * rounding
    assert len(resumed.rounding) == len(resumed.engine)
    # The trainer's head rounds no logits, so its own rounding is somewhat less.
    assert float(resumed.rounding.double().mean()) == pytest.approx(float(rounding), rel=0.5)


def test_verify_finds_no_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder / "whole"), "--step", "1", "--sequences", "2"]) == 0, capsys.readouterr().out
    assert "step 2, 2 of the update's 16 sequences: every quantity is within its bound." in capsys.readouterr().out


def test_the_report_shows_the_run(folder: Path) -> None:
    """Its last reward, and a sample's words; no number is missing."""
    assert main(["report", str(folder / "whole"), "-o", str(folder / "report.html")]) == 0
    page = (folder / "report.html").read_text()
    assert metrics(folder / "whole")[-1]["reward/mean"] == 0.25  # the demonstrations' alone
    assert "The books cost 3 * 9 = 27 dollars." in re.sub(r"<[^>]*>", "", page)
    assert not re.search(r">\s*(nan|inf|None)\s*<", page)


def test_eval_counts_boxes_and_ends(folder: Path, smollm2: str) -> None:
    found = evaluate(smollm2, folder, problems=4, samples=4, tokens=96)
    assert sum(found.statuses.values()) == 16
    assert found.file["statuses"] == found.statuses
    assert found.file["correct"] == found.correct
    assert found.file["truncated_share"] == found.statuses["cut_off"] / 16
    assert found.file["model"].startswith(f"{smollm2}@")
