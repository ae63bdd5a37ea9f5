"""The demo: its task against plain arithmetic, its splits, tokenizer, base model, and what it does around the runs."""

import io
import json
import random
import re
import subprocess
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.demo import demo_run as demo
from experiments.demo.__main__ import main
from experiments.toy import base_model
from experiments.toy.base_model import ToyBase, make_base, make_model, response_loss
from experiments.toy.task import (
    EASY,
    HARD,
    PLUS,
    Problem,
    Task,
    draw_splits,
    make_tokenizer,
    read_jsonl,
    scratchpad,
    write_jsonl,
)
from rlplus.common.terminal import Terminal
from rlplus.tools.report import seeds_line
from rlplus.train.config import load_config
from rlplus.train.data import load_examples, load_tokenizer
from rlplus.train.evaluation.estimates import Estimate
from rlplus.train.evaluation.results import Evaluation, save_results
from rlplus.train.reward import Scorer
from rlplus.train.rollout import RunFailed


def draw(rng: random.Random, length: int, exclude: Collection[Problem] = ()) -> Problem:
    return Task().draw(rng, (PLUS, length), exclude)


QUICK = ToyBase(batch=2, learnt_loss=100.0, sloppy_steps=2)  # any loss will do: two phases, no skill


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)


def test_sums_are_digitwise_and_without_carry() -> None:
    rng = random.Random(0)
    for length in (EASY, HARD):
        problem = draw(rng, length)
        columns = [[int(number[i]) for number in problem.numbers] for i in range(5)]
        sums = ["".join(str(sum(column[: n + 1]) % 4) for column in columns) for n in range(length)]
        assert problem.answer == sums[-1]
        assert problem.demonstration == ";" + ",".join(sums[:-1]) + ":" + sums[-1]
        assert len(problem.prompt) == 6 * HARD


def test_slips_have_their_share_and_are_carried_on() -> None:
    problem = Problem(("00000", "11111", "11111"))
    rng = random.Random(1)
    slipped = []
    for _ in range(400):
        sums = ["33333", *problem.running_sums(rng, 0.2)]  # every right step adds one
        slipped += [int(b) != (int(a) + 1) % 4 for one, two in pairwise(sums) for a, b in zip(one, two, strict=True)]
    assert sum(slipped) / len(slipped) == pytest.approx(0.2 * 3 / 4, abs=0.02)  # a redrawn digit is right by chance
    assert problem.running_sums(rng, 0.0) == ["00000", "11111", "22222"]


def test_splits_share_no_problem_and_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = draw_splits(3)
    assert (train, test) == draw_splits(3)
    assert draw_splits(4)[1] != test
    assert len({p.prompt for p in train + test}) == len(train) + len(test)
    assert sum(p.hard for p in test) * 2 == len(test)
    assert sum(p.hard for p in train) * 4 == len(train)
    for name, value in (("WIDTH", 1), ("DEMO_TRAIN", 12), ("DEMO_TEST", 12)):  # 15 of the 16 easy problems that exist
        monkeypatch.setattr(f"experiments.toy.task.{name}", value)
    train, test = draw_splits(3)
    assert len(set(train + test)) == 24


def test_draw_leaves_out_what_is_excluded() -> None:
    first = draw(random.Random(5), EASY)
    assert draw(random.Random(5), EASY, {first}) != first


def test_tokenizer_and_files_make_the_round_trip(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    problem = draw(random.Random(2), HARD)
    ids = tokenizer(problem.prompt).input_ids
    assert len(ids) == len(problem.prompt)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == problem.prompt
    assert {tokenizer.pad_token_id, tokenizer.eos_token_id}.isdisjoint(ids)
    with pytest.raises(Exception, match="UNK"):
        tokenizer("9")

    problems = draw_splits(0)[0][:8]
    write_jsonl(tmp_path / "train.jsonl", problems)
    assert read_jsonl(tmp_path / "train.jsonl") == problems
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    first = problems[0]
    assert row == {"prompt": first.prompt, "answer": first.answer, "demonstration": first.demonstration}


def test_config_fits_the_data_and_both_algorithms(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    train, _ = draw_splits(0)
    write_jsonl(tmp_path / "train.jsonl", train[:16])
    for preset in ("rlplus", "grpo"):
        config = load_config(
            demo.CONFIG,
            [f"algorithm.preset={preset}", f"data.path={tmp_path / 'train.jsonl'}", f"model.path={tmp_path}"],
        )
        examples, report = load_examples(
            config.data, load_tokenizer(config.model), max_demonstration_length=config.max_demonstration_length
        )
        assert len(examples) == report.demonstrations == 16
        assert config.train.generated_tokens is not None
    with Scorer(config.reward) as scorer:
        problem = train[3]
        wrong = "11111" if problem.answer != "11111" else "00000"
        texts = [":" + problem.answer, problem.demonstration, problem.answer, f":{wrong}:{problem.answer}", f":{wrong}"]
        assert [score.value for score in scorer(texts, [problem.answer] * 5)] == [1, 1, 0, 0, 0]


def test_loss_is_the_mean_over_the_tokens_of_the_responses() -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = make_model(tokenizer)
    rng = random.Random(0)
    problems = [draw(rng, length) for length in (HARD, EASY, HARD)]
    responses = [problems[0].demonstration, ":" + problems[1].answer, ":01230"]
    losses = []
    for problem, response in zip(problems, responses, strict=True):  # one at a time: no padding
        prompt = tokenizer(problem.prompt).input_ids
        ids = [*prompt, *tokenizer(response).input_ids, tokenizer.eos_token_id]
        logprob = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-logprob[i - 1, ids[i]] for i in range(len(prompt), len(ids))]
    prompts = [problem.prompt for problem in problems]
    torch.testing.assert_close(response_loss(model, tokenizer, prompts, responses), torch.stack(losses).mean())


def test_base_is_written_in_full_and_reused(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    original = base_model.response_loss

    def spy(model, tokenizer, prompts, responses):  # type: ignore[no-untyped-def]
        shown.extend(prompts)
        return original(model, tokenizer, prompts, responses)

    monkeypatch.setattr(base_model, "response_loss", spy)
    folder = tmp_path / "base"
    held_out = frozenset(draw_splits(0)[1])
    assert make_base(folder, QUICK, 0, held_out, console)
    assert shown
    assert not {problem.prompt for problem in held_out} & set(shown)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.head_dim == 32  # vLLM on CPUs refuses 16
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    assert list(folder.glob("*.safetensors"))

    before = (folder / "model.safetensors").read_bytes()
    assert not make_base(folder, QUICK, 0, held_out, console)
    (folder / "base.json").unlink()  # an interruption leaves it so
    assert make_base(folder, QUICK, 0, held_out, console)
    assert (folder / "model.safetensors").read_bytes() == before
    assert make_base(folder, QUICK, 1, held_out, console)
    assert (folder / "model.safetensors").read_bytes() != before


def test_a_base_that_reads_is_shown_responses_that_it_cannot_compute_before_their_problems(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[tuple[str, str]]] = []
    original = base_model.response_loss

    def spy(model, tokenizer, prompts, responses):  # type: ignore[no-untyped-def]
        given.append(list(zip(prompts, responses, strict=True)))
        return original(model, tokenizer, prompts, responses)

    monkeypatch.setattr(base_model, "response_loss", spy)
    make_base(tmp_path / "base", replace(QUICK, reads=True), 0, frozenset(), console)
    plain, reading = given[::2], given[1::2]
    assert len(plain) == len(reading) > QUICK.sloppy_steps
    right, scratchpads = [], []
    for asked, repeated in zip(plain, reading, strict=True):
        for (prompt, _), (longer, response) in zip(asked, repeated, strict=True):
            assert longer == response + prompt
            numbers = [number for number in prompt[:-1].split("+") if "-" not in number]
            answer = [str(sum(map(int, digits)) % 4) for digits in zip(*numbers, strict=True)]
            right += [shown == digit for shown, digit in zip(response[-5:], answer, strict=True)]
            scratchpads.append(response.startswith(";"))
    assert 0.4 < fmean(right) < 0.85  # a digit that is drawn anew is right once in four times: .625
    assert 0 < fmean(scratchpads) < 1


def test_base_that_learns_nothing_is_an_error(tmp_path: Path, console: Console) -> None:
    with pytest.raises(RunFailed, match="did not learn the scratchpad in 9 steps"):
        make_base(tmp_path / "base", replace(QUICK, learnt_loss=0.0, max_clean_steps=9), 0, frozenset(), console)
    assert not (tmp_path / "base").exists()


def evaluation(correct: list[int], name: str = "") -> Evaluation:
    size = len(correct)
    counts = (tuple(range(size)), (8,) * size, tuple(correct))
    return Evaluation(name, *counts, (1, 8), 1.0, 0, 7.0, 0.0, {"ok": 8 * size}, sum(correct) / (8 * size))


def test_tables_split_by_kind_and_compare() -> None:
    evaluations = {
        demo.BASE: [evaluation([4, 0, 4, 1])],
        demo.GRPO: [evaluation([8, 0, 8, 0])],
        demo.RLPLUS: [evaluation([8, 8, 8, 8])],
    }
    console = Console(width=80, file=io.StringIO())
    console.print(demo.results_table(evaluations, [False, True, False, True]))
    results = console.file.getvalue()
    assert re.findall(r"(\d+\.\d) \(", results) == [
        "28.1", "75.0", "50.0", "50.0", "100.0", "100.0",
        "50.0", "100.0", "100.0", "100.0", "100.0", "100.0",
        "6.2", "50.0", "0.0", "0.0", "100.0", "100.0",
    ]  # fmt: skip
    console.print(demo.differences_table(evaluations))
    differences = console.file.getvalue()[len(results) :]
    assert re.findall(r"([+-]\d+\.\d) \(", differences) == ["+21.9", "-25.0", "+71.9", "+25.0", "+50.0", "+50.0"]


def test_each_seed_is_shown_and_those_where_the_boundary_shrinks_are_counted() -> None:
    """No outcome stands in the text: with other results it says otherwise."""
    base = [evaluation([4, 0, 4, 1]), evaluation([4, 0, 4, 0]), evaluation([1, 1, 1, 1])]
    worse = [evaluation([8, 0, 8, 0]), evaluation([8, 0, 8, 0]), evaluation([8, 8, 8, 0])]
    better = [evaluation([8, 8, 8, 8])] * 3
    for grpo, rlplus, counts in ((worse, better, (2, 0)), (better, worse, (0, 2)), (base, base, (0, 0))):
        evaluations = {demo.BASE: base, demo.GRPO: grpo, demo.RLPLUS: rlplus}
        console = Console(width=80, file=io.StringIO())
        console.print(demo.seeds_table(evaluations))
        shown = " ".join(console.file.getvalue().split())
        wanted = [f"{sum(one.correct) / 32:.1%} / {sum(c > 0 for c in one.correct) / 4:.1%}" for one in (*base, *grpo)]
        assert all(cell.replace("%", "") in shown for cell in wanted)
        line = f"is below that of base: GRPO on {counts[0]} of 3 seeds, RL-PLUS on {counts[1]} of 3 seeds."
        assert line in shown
        assert line in seeds_line(evaluations, 8)


@pytest.mark.parametrize(
    ("estimate", "shown"),
    [
        (Estimate(0.978, 0.976, 0.981), "97.8 (97..99)"),
        (Estimate(0.29, 0.29, 0.29), "29.0 (29..29)"),
        (Estimate(1.0, 0.981, 1.0), "100.0 (98..100)"),
        (Estimate(0.0, 0.0, 0.004), "0.0 (0..1)"),
    ],
)
def test_a_mean_stands_within_its_limits_as_shown(estimate: Estimate, shown: str) -> None:
    assert demo._percent(estimate) == shown


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands are noted, and leave behind what the real ones would; bases take no time."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command[command.index("rlplus") + 1 :])
        settings = dict(word.split("=", 1) for word in command if "=" in word and not word.startswith("-"))
        if "train" in command:
            folder = Path(settings["output_dir"])
            folder.mkdir()  # it would refuse an earlier run, like the real one
            (folder / "config.yaml").write_text("model: {}\n")
            (folder / "metrics.jsonl").write_text('{"step": 1, "generated_tokens": 10, "reward/internal": 0.5}\n')
        else:
            save_results(Path(command[command.index("--output") + 1]), {"test": evaluation([1, 2] * 100)})
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setattr(demo, "ToyBase", lambda: QUICK)
    return commands


def test_demo_runs_twice_into_the_same_folder(
    tmp_path: Path, fake_runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    report = demo.run_demo(tmp_path / "out", seeds=2)
    assert report == tmp_path / "out" / "report.html"
    said = "pass@8 over all problems is below that of base: GRPO on 0 of 2 seeds, RL-PLUS on 0 of 2 seeds."
    assert said in report.read_text()
    captured = capsys.readouterr()
    assert said in " ".join(captured.out.split())
    assert "again" not in captured.err
    trained = [command for command in fake_runs if command[0] == "train"]
    assert len(trained) == 4
    assert len(fake_runs) == 10
    grpo, rlplus = trained[:2]  # the same settings but for the algorithm and the folder
    assert {word.split("=")[0] for word in set(grpo) ^ set(rlplus)} == {"algorithm.preset", "output_dir"}
    demo.run_demo(tmp_path / "out", seeds=1)
    assert "of 1 seeds" not in report.read_text()
    said = " ".join(capsys.readouterr().err.split())
    assert "is used again" in said
    assert "is replaced" in said


@pytest.mark.slow
def test_demo_with_real_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ToyBase", lambda: QUICK)
    small = ["rollout.engine=transformers", "train.prompts_per_step=4", "train.generated_tokens=500"]
    report = demo.run_demo(tmp_path, overrides=[*small, "evaluation.samples=2", "evaluation.k=[1, 2]"])
    for preset in ("grpo", "rlplus"):
        lines = (tmp_path / "seed0" / preset / "metrics.jsonl").read_text().splitlines()
        tokens = [json.loads(line)["generated_tokens"] for line in lines]
        assert tokens[-1] >= 500  # the budget of both, overshot by less than a step
        assert all(count < 500 for count in tokens[:-1])
        assert (tmp_path / "seed0" / preset / "model" / "config.json").is_file()
    assert "pass@2" in capsys.readouterr().out
    assert "<svg" in report.read_text()


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="want an empty folder"):
        demo.run_demo(tmp_path)
    with pytest.raises(ValueError, match="got the file"):
        demo.run_demo(tmp_path / "thesis.txt")
    with pytest.raises(ValueError, match="at least one seed"):
        demo.run_demo(tmp_path / "new", seeds=0)


def test_the_command_says_in_a_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0", "--output", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == "python -m experiments.demo: want at least one seed; got 0\n"


def test_failure_shows_the_last_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    console = Terminal(stderr=True)
    with pytest.raises(RunFailed, match=r"GRPO: training failed with exit status 2; .*x\.log"):
        demo._command("GRPO: training", ["train", "no-such.yaml"], tmp_path / "x.log", console)
    assert "no-such.yaml" in capfd.readouterr().err


def test_scratchpad_of_one_sum_has_no_comma() -> None:
    assert scratchpad(["01230", "11111"]) == ";01230:11111"
