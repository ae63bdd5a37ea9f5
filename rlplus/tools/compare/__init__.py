"""`rlplus compare`: several methods from the same base model, over seeds, in one table.

The names are imported on first use: a report has the results of a comparison without torch.
"""

from typing import TYPE_CHECKING

from rlplus.common.lazy import lazy_names

if TYPE_CHECKING:
    from rlplus.tools.compare.comparing import MARK, compare_past_runs, run_comparison
    from rlplus.tools.compare.config import BASE, Comparison, load_comparison
    from rlplus.tools.compare.launches import Runner
    from rlplus.tools.compare.outcomes import Outcome, Results
    from rlplus.tools.compare.page import page_of
    from rlplus.tools.compare.past_runs import split_name

__all__ = [
    "BASE",
    "MARK",
    "Comparison",
    "Outcome",
    "Results",
    "Runner",
    "compare_past_runs",
    "load_comparison",
    "page_of",
    "run_comparison",
    "split_name",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "comparing": ("MARK", "compare_past_runs", "run_comparison"),
        "config": ("BASE", "Comparison", "load_comparison"),
        "launches": ("Runner",),
        "outcomes": ("Outcome", "Results"),
        "page": ("page_of",),
        "past_runs": ("split_name",),
    },
)
