"""The folder of an evaluation: nothing that another one left there is replaced unless that is asked for."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from rlplus.common import agree
from rlplus.common.durable import make_folder
from rlplus.train.data import SAMPLES
from rlplus.train.evaluation.asked import Asked, differences
from rlplus.train.evaluation.partial_samples import asked_in, facts_of
from rlplus.train.evaluation.results import RESULTS, Evaluation

_NAMED = 4  # differences in a message


def held(output: Path) -> AbstractContextManager[None]:
    """Keep the folder, which is made if needed, for this evaluation; ValueError while another one has it. Collective.

    Training may go on in the folder: its files have other names.
    """
    make_folder(output)
    refusal = f"another evaluation is writing into {output}: wait for its end, or give another --output"
    return agree.locked(output / ".lock-evaluation", refusal)


def check_folder(output: Path, asked: Mapping[str, Asked]) -> None:
    """ValueError if there are results or samples of another evaluation. asked: by benchmark, of this one."""
    if not (others := others_in(output, asked)):
        return
    path, (*named,) = next(iter(others.items()))
    more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    raise ValueError(
        f"want a folder without another evaluation's results and samples; got {output}, where {len(others)} "
        f"file{'s are' if len(others) > 1 else ' is'} of another model, data or settings. {path.relative_to(output)}: "
        f"{'; '.join(named[:_NAMED])}{more}. Give another --output, or --overwrite, which removes what is there"
    )


def others_in(output: Path, asked: Mapping[str, Asked]) -> dict[Path, list[str]]:
    """Results and samples of other evaluations, with what differs.

    Of benchmarks that are not evaluated now only the model counts: they may have settings of their own. Damaged files
    have nothing to lose.
    """
    found = {}
    for path in (*sorted(output.glob(f"{RESULTS}-*.json")), *sorted((output / SAMPLES).glob(f"{RESULTS}-*.parquet"))):
        there = _asked_at(path)
        if there is None:
            continue
        if not there:
            found[path] = ["of an earlier version"]
            continue
        ours = asked.get(there.get("benchmark", ""))
        if ours is None:
            model = next(iter(asked.values()))["model"]
            there = {"model": there.get("model", model)}
            ours = {"model": model}
        if different := differences(there, ours):
            found[path] = different
    return found


def _asked_at(path: Path) -> Asked | None:
    """The settings, model and data of a result or samples, as far as they are known; None of a damaged file."""
    if not path.is_file():
        return None
    if path.suffix == ".parquet":
        return None if (facts := facts_of(path)) is None else asked_in(facts)
    try:
        result = Evaluation.load(path)
    except ValueError:
        return None
    settings = {"evaluation.temperature": str(result.temperature), "train.seed": str(result.seed)}
    known = {"benchmark": result.name} | settings | ({"model": result.model} if result.model else {})
    return result.asked or known
