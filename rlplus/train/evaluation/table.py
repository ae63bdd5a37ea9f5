"""The results of an evaluation as a table for the terminal."""

from collections.abc import Mapping

from rich.table import Table

from rlplus.train.evaluation.results import Evaluation, not_graded

_COLUMNS = (
    "benchmark", "problems", "samples", "pass@k", "mean", "95% interval", "graded by", "not graded", "truncated",
    "tokens", "time",
)  # fmt: skip


def result_table(results: Mapping[str, Evaluation]) -> Table:
    """One row per benchmark and k.

    not graded: number of samples by status, see `rlplus.train.reward.Score`. truncated: share of the responses that
    reached the limit of tokens. tokens: mean length of a response.
    """
    table = Table(*_COLUMNS)
    for name, result in results.items():
        further = (
            result.grader,
            not_graded(result.statuses),
            f"{result.truncated_share:.1%}",
            f"{result.mean_response_length:.0f}",
            f"{result.seconds:.0f} s",
        )
        for k in result.k:
            estimate = result.pass_at(k)
            interval = f"[{estimate.low:.3f}, {estimate.high:.3f}]"
            drawn = "–".join(map(str, sorted({min(result.n), max(result.n)})))
            table.add_row(
                name, str(len(result.problems)), drawn, f"pass@{k}", f"{estimate.mean:.3f}", interval, *further
            )
        table.add_section()
    return table
