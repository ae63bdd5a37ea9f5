"""The report's sentence on how likely the model found the demonstrations in the first step."""

from dataclasses import replace
from pathlib import Path

import pytest
from report_pages import run, written

from docs.which_method import FORMS, OTHER, OWN, familiarity, loaded
from rlplus.tools.report import RunData, foreign_demonstrations
from rlplus.tools.report.foreign_demonstrations import found_at

P, LOGPROB = "actor/prob_external", "actor/logprob_external"


def first_step(**values: float) -> RunData:
    one = run(3)
    first = {key: value for key, value in one.metrics[0].items() if key not in (P, LOGPROB)}
    return replace(one, metrics=(first | {f"actor/{key}": value for key, value in values.items()}, *one.metrics[1:]))


@pytest.mark.parametrize(
    ("p", "said"), [(0.8, "above GRPO at 0.73 and more"), (0.3, "nowhere clearly above GRPO"), (0.6, "nothing between")]
)
def test_the_first_steps_probability_is_shown_with_what_the_study_found(tmp_path: Path, p: float, said: str) -> None:
    page = written(tmp_path, {"a": first_step(prob_external=p, logprob_external=-1.25)}, {})
    assert (
        f"a: in step 1 the mean probability of the demonstrations' tokens was {p:.2f}, their mean logprob -1.25 nats."
        in page.text
    )
    assert said in page.text


def test_runs_are_averaged_and_older_ones_have_no_logprob(tmp_path: Path) -> None:
    page = written(
        tmp_path, {"a": [first_step(prob_external=0.2), first_step(prob_external=0.4, logprob_external=-2)]}, {}
    )
    assert "tokens was 0.30. In our study" in page.text


def test_without_demonstrations_or_the_first_step_nothing_is_said(tmp_path: Path) -> None:
    later = first_step(prob_external=0.2)
    later = replace(later, metrics=({**later.metrics[0], "step": 2}, *later.metrics[1:]))
    page = written(tmp_path, {"a": first_step(), "b": later}, {})
    assert "in step 1 the mean probability" not in page.text


def test_the_bounds_are_those_of_the_committed_results() -> None:
    first = {form: [familiarity(list(runs.of("RL-PLUS").values())) for runs in each] for form, each in FORMS.items()}
    assert round(min(first[OWN]), 2) == foreign_demonstrations.OWN
    assert round(max(first[OTHER]), 2) == foreign_demonstrations.FOREIGN
    assert loaded("words").outcomes
    assert "the model's own form, but for its own responses" in found_at(0.73)
    assert found_at(0.51).endswith("a foreign form.")
