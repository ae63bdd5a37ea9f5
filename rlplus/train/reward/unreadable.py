"""Answers that a grader cannot read, found before a run: every response to their prompts would be worth 0."""

import re
from collections.abc import Sequence

from rlplus.train.config import RewardConfig
from rlplus.train.data import Example
from rlplus.train.reward.scorer import Scorer

_READ = ("ok", "unparsed", "no_box")  # an empty response has this status where the answer could be read
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?")
# Answers that need no grader to try them, by kind; any other one is tried.
_PLAIN = {
    "exact_match": re.compile(r"(?s).*"),
    "choice": re.compile("[A-Ja-j1-9]"),
    "math_verify": _NUMBER,
    "math_verify_box": _NUMBER,
    "math_verify_strict": _NUMBER,
    "oat": _NUMBER,
}


def unreadable_answers(reward: RewardConfig, examples: Sequence[Example], most: int | None = None) -> list[str]:
    """A sentence for each kind of grader in `reward` that cannot read some of the answers, with their number.

    most: the number of examples to look at, spread over all; None = all. Functions of the user's own read what they
    like.
    """
    looked_at = examples[:: -(-len(examples) // most)] if most else examples
    lines = []
    for kind in (name for name in reward.names if ":" not in name):
        simple = _PLAIN.get(kind)
        odd = list(dict.fromkeys(e.answer for e in looked_at if simple is None or not simple.fullmatch(e.answer)))
        if not odd:
            continue
        alone = reward.model_copy(update={"kind": kind, "function": None, "on_failure": "zero"})
        with Scorer(alone) as scorer:
            verdicts = dict(zip(odd, scorer([""] * len(odd), odd), strict=True))
        wrong = [e for e in looked_at if e.answer in verdicts and verdicts[e.answer].status not in _READ]
        if wrong:
            first = wrong[0]
            lines.append(
                f"answers: {len(wrong):,} of {len(looked_at):,} cannot be read by {kind}: every response there is "
                f"worth 0 (first: row {first.index + 1}, {first.answer[:40]!r}, {verdicts[first.answer].detail})"
            )
    return lines
