"""The table of models.md: families and what was tested on each."""

from collections.abc import Callable, Iterator

from rlplus.train.learner.pretrained import MIXES
from tests.support.causal_lms import EXPERT_FAMILIES, FAMILIES, UNPLANNED, config_of

Table = Callable[[tuple[str, ...], Iterator[tuple[str, ...]]], str]


def families(table: Table) -> str:
    """A row per family: the loss behind its head, training on packed sequences, the plan."""
    changes = {family: values for family, values, _ in FAMILIES}
    return table(
        ("family", "model type", "experts", "`fuse_head`", "trainer", "plan"), map(row, changes, changes.values())
    )


def row(family: str, changes: dict[str, object]) -> tuple[str, ...]:
    kind = config_of(family, changes).model_type
    mixes = kind in MIXES
    planned = "refused" if mixes else "no" if family in UNPLANNED else "yes"
    name = family.removesuffix("LMHeadModel")
    return name, f"`{kind}`", "yes" if family in EXPERT_FAMILIES else "", "yes", "refused" if mixes else "yes", planned
