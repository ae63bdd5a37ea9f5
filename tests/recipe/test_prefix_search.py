"""The recipe of searched prefixes: bisection, what a step trains on, the loss, and that a run resumes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_cases import check_gradient, drawn_batch, recipe_of, resumed, tokens_of
from torch import Tensor
from trainer_runs import run_config
from update_cases import packed

from rlplus.train.data import Example, Sample
from rlplus.train.recipe import Ask, Batch, Recipe
from rlplus.train.recipe.prefix_search import PrefixSearchRecipe
from rlplus.train.trainer import Run, open_run

SIZE = 4
LONG = Example(3, (1, 2), "", tuple(range(10, 51)))  # 40 tokens and the end


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that is built and never trained."""
    with open_run(run_config(tmp_path_factory.mktemp("run"), algorithm={"preset": "bread"})) as run:
        yield run


def bread(folder: Path, **options: Any) -> PrefixSearchRecipe:
    rollout = {"engine": "transformers", "group_size": SIZE, "max_response_length": 48}
    recipe = recipe_of(folder, algorithm={"preset": "bread", "recipe": options}, rollout=rollout)
    assert isinstance(recipe, PrefixSearchRecipe)
    return recipe


def group(number: int, example: Example, prefix: Sequence[int], right: int) -> list[Sample]:
    return [
        Sample(example.prompt, [*prefix, 99], number, False, False, None, reward=float(i < right)) for i in range(SIZE)
    ]


def search(
    recipe: Recipe, examples: Sequence[Example], right: Callable[[int, int], int]
) -> tuple[list[list[int]], Batch]:
    """The lengths of each group's prefixes, in turn, and the batch. right: solved rollouts by group and length."""
    tried: list[list[int]] = [[0] for _ in examples]
    samples = [s for i, example in enumerate(examples) for s in group(i, example, (), right(i, 0))]

    def draw() -> Batch:
        batch, tries = Batch(list(examples), samples, 0.0), 0
        while asks := recipe.again(batch, tries):
            tries += 1
            kept = [s for s in batch.samples if s.group not in asks]
            for number, ask in asks.items():
                kept += group(
                    number, examples[number], check(ask, examples[number]), right(number, len(ask.prefixes[0]))
                )
                tried[number].append(len(ask.prefixes[0]))
            batch = replace(batch, samples=sorted(kept, key=lambda s: s.group))
        return batch

    return tried, recipe.collect(draw)


def check(ask: Ask, example: Example) -> Sequence[int]:
    """The prefix, which all of a whole group have: the beginning of the demonstration, but not its end."""
    assert (ask.rollouts, ask.demonstrated, ask.replayed) == (SIZE, False, None)
    assert len(ask.prefixes) == SIZE
    (prefix,) = {tuple(prefix) for prefix in ask.prefixes}
    assert example.demonstration is not None
    assert prefix == example.demonstration[: len(prefix)]
    assert 0 < len(prefix) < len(example.demonstration) - 1
    return prefix


@pytest.mark.parametrize("parts", [2, 3, 7, 10, 40])
def test_bisection_finds_the_only_prefix_that_helps(run: Run, tmp_path: Path, parts: int) -> None:
    """Behind shorter ones no rollout is right, behind longer ones all are; each number of parts is some prompt's."""
    recipe = bread(tmp_path, parts=parts)
    wanted = [round(40 * number / parts) for number in range(1, parts)]

    def right(prompt: int, length: int) -> int:
        return 0 if length < wanted[prompt] else 1 if length == wanted[prompt] else SIZE

    tried, _ = search(recipe, [LONG] * len(wanted), right)
    assert [lengths[-1] for lengths in tried] == wanted
    most = math.ceil(math.log2(parts))
    assert max(len(lengths) - 1 for lengths in tried) == most
    tokens = sum(wanted)
    assert recipe.metrics() == {
        "prefix/share": (tokens, 40 * len(wanted)),
        "prefix/unsolved": (len(wanted), len(wanted)),
        "prefix/found": (len(wanted), len(wanted)),
        "prefix/tries": (sum(len(lengths) - 1 for lengths in tried), len(wanted)),
        "reward/without_prefix": (0.0, SIZE * len(wanted)),
    }


def test_a_search_ends_where_it_first_helps_or_nothing_is_left(run: Run, tmp_path: Path) -> None:
    """Ten parts of four tokens: bisection begins at 5."""
    recipe = bread(tmp_path)
    solved = {
        0: lambda length: SIZE if length >= 36 else 0,  # 9 parts do too much, 8 too little
        1: lambda length: 0,
        2: lambda length: SIZE * (length > 0),
        3: lambda length: 1 if length >= 8 else 0,  # 5 parts are not the fewest that help
        4: lambda length: 1,
        5: lambda length: SIZE,
    }
    tried, batch = search(recipe, [LONG] * 6, lambda prompt, length: solved[prompt](length))
    assert tried == [[0, 20, 28, 32, 36], [0, 20, 28, 32, 36], [0, 20, 8, 4], [0, 20], [0], [0]]
    assert [len(batch.samples[SIZE * i].response) - 1 for i in range(6)] == [36, 36, 4, 20, 0, 0]
    assert recipe.metrics()["prefix/found"] == (1, 4)
    assert recipe.metrics()["prefix/unsolved"] == (4, 6)
    assert recipe.metrics()["reward/without_prefix"] == (5.0, 6 * SIZE)
    assert recipe.state() is None


def test_bounds_say_how_many_rollouts_are_to_be_right(run: Run, tmp_path: Path) -> None:
    recipe = bread(tmp_path, above=0.25, below=0.75)
    tried, _ = search(recipe, [LONG] * 4, lambda prompt, length: [2, 1, 1, 3][prompt] if not length else prompt)
    # one of four is too few, three are too many behind a prefix only
    assert tried == [[0], [0, 20, 28, 32, 36], [0, 20], [0]]
    for options, message in (
        ({"above": 0.5, "below": 0.5}, "want above < below; got 0.5 and 0.5"),
        ({"parts": 1}, "greater than or equal to 2"),
        (
            {"above": 0.3, "below": 0.45},
            "want a rollout.group_size of at least 2 and wider bounds; got 4, 0.3 and 0.45",
        ),
        ({"above": 0.75}, "no number of right rollouts of a group is inside above and below"),
        ({"below": 1.5}, "less than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            bread(tmp_path, **options)


def test_what_cannot_be_searched_stays(run: Run, tmp_path: Path) -> None:
    """Without a demonstration, without two tokens of one, without any graded rollout; short ones have fewer parts."""
    recipe = bread(tmp_path)
    examples = [replace(LONG, demonstration=text) for text in (None, (5,), (7, 5), (7, 8, 5), (7, 8, 9, 5))]
    tried, _ = search(recipe, examples, lambda prompt, length: 0)
    assert tried == [[0], [0], [0], [0, 1], [0, 1, 2]]
    ungraded = [replace(sample, reward=math.nan) for sample in group(0, LONG, (), 0)]
    assert ungraded[0].masked
    assert recipe.again(Batch([LONG], ungraded, 0.0), 0) == {}
    some = [*ungraded[:2], *group(0, LONG, (), 0)[2:]]
    assert recipe.again(Batch([LONG], some, 0.0), 0).keys() == {0}
    # the grader fails behind the prefix: nothing is known of it
    assert recipe.again(Batch([LONG], ungraded, 0.0), 1) == {}
    assert recipe.metrics()["prefix/found"] == (0, 4)
    assert recipe.metrics()["reward/without_prefix"] == (0.0, 5 * SIZE + 2)


def test_metrics_of_a_step_are_of_all_its_draws(run: Run, tmp_path: Path) -> None:
    recipe = bread(tmp_path)
    first = Batch([LONG] * 3, [s for i in range(3) for s in group(i, LONG, (), i)], 0.0)

    def draw() -> Batch:
        assert recipe.again(first, 0).keys() == {0}
        behind = Batch([LONG] * 3, [*group(0, LONG, (10,), 2), *first.samples[SIZE:]], 0.0)
        assert recipe.again(behind, 1) == {}
        return behind

    recipe.collect(lambda: (draw(), draw())[1])
    want = {"prefix/share": (40, 80), "prefix/unsolved": (2, 6), "prefix/found": (2, 2), "prefix/tries": (2, 2)}
    assert recipe.metrics() == want | {"reward/without_prefix": (6.0, 6 * SIZE)}
    recipe.collect(lambda: first)
    assert recipe.metrics()["prefix/unsolved"] == (0, 0)


def test_bread_is_grpo_with_a_kl_term_behind_the_prefix(run: Run, tmp_path: Path) -> None:
    """As if the prefix stood in the prompt: PPO's clip, advantages divided by std, a mean per response, .001 KL."""
    recipe = recipe_of(tmp_path, algorithm={"preset": "bread"})
    drawn = drawn_batch([[0, 1, 1], [0, 0, 0], [1, 0, 0]])
    shown = {}
    for i, sample in enumerate(drawn.samples):
        prefix = [7, 8, 9][: sample.group]
        shown[i] = len(prefix)
        sample.response = [*prefix, *sample.response, *[11] * (i % 2)]
        sample.external = [True] * len(prefix) + [False] * (len(sample.response) - len(prefix))
    recipe.credit(drawn)
    high, low, std = 2 / 3, 1 / 3, math.sqrt(1 / 3) + 1e-6
    advantage = {(0, 1): low / std, (0, 0): -high / std, (1, 0): 0.0, (2, 1): high / std, (2, 0): -low / std}
    micros = packed(run, drawn.samples, algorithm=recipe.algorithm)
    generator = torch.Generator().manual_seed(0)
    old, ref = {}, {}
    for micro in micros:
        own = run.policy.logprob(micro)
        micro.old_logprob = own + 1.2 * (torch.rand(own.shape, generator=generator) - 0.5)
        micro.ref_logprob = own + 1.2 * (torch.rand(own.shape, generator=generator) - 0.5)
        for i in dict.fromkeys(micro.sequence.tolist()):
            here = micro.sequence == i
            old[i], ref[i] = micro.old_logprob[here].double(), micro.ref_logprob[here].double()

    def loss(lm: Any) -> Tensor:
        total, clipped = torch.zeros((), dtype=torch.float64), False
        for i, sample in enumerate(drawn.samples):
            n, A = shown[i], advantage[sample.group, int(sample.reward)]
            logp = tokens_of(lm, sample)[0][n:]
            r, d = (logp - old[i][n:]).exp(), ref[i][n:] - logp
            surrogate = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
            clipped |= bool((r * A != surrogate).any())
            total = total + (1e-3 * (d.exp() - d - 1) - surrogate).mean() / len(drawn.samples)
        assert clipped
        return total

    check_gradient(run, [(micros, recipe.algorithm)], loss)


def test_a_search_needs_the_weights_of_its_step(run: Run, tmp_path: Path) -> None:
    process = {"engine": "transformers", "mode": "process", "group_size": 4, "max_response_length": 8}
    with pytest.raises(ValueError, match=r"train\.overlap does not support algorithm\.recipe prefix-search"):
        run_config(tmp_path, algorithm={"preset": "bread"}, rollout=process, train={"overlap": 1})
    environment = {"environment": {"library": "verifiers", "name": "games"}}
    with pytest.raises(ValueError, match=r"prefix-search: it does not support rollout\.environment"):
        run_config(tmp_path, algorithm={"preset": "bread"}, rollout=environment, data={"columns": ["row"]})
    with pytest.raises(ValueError, match=r"so that a token is sampled; got 9 and 8"):
        run_config(tmp_path, algorithm={"preset": "bread"}, data={"max_demonstration_length": 9})
    for key in ("external_top_entropy=0.5", "external_reduction=token"):
        name, _, value = key.partition("=")
        with pytest.raises(ValueError, match=rf"algorithm\.{name}.*what is demonstrated is context"):
            run_config(tmp_path, algorithm={"preset": "bread", name: float(value) if value[0] == "0" else value})


def test_a_run_of_bread_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = resumed(tmp_path, monkeypatch, {"preset": "bread"}, PrefixSearchRecipe)
    shares = [row["prefix/share"] for row in rows if row["prefix/unsolved"]]
    assert all(1 / 3 - 1e-9 <= share <= 2 / 3 + 1e-9 for share in shares)
    assert len(set(shares)) > 2
    assert 0 < sum(row["prefix/found"] for row in rows if row["prefix/unsolved"]) < len(shares)
    for row in rows:
        assert row["mismatch/mean"] < 1e-5
        assert row["response_length/max"] <= 8
        assert "actor/prob_external" not in row
        assert row["prefix/tries"] <= 2
