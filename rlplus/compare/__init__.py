"""`rlplus compare`: several methods from the same base model, over seeds, in one table."""

import signal
from collections.abc import Sequence
from pathlib import Path

from rlplus.compare.config import BASE, Comparison, load_comparison
from rlplus.compare.page import study_tables, write_page
from rlplus.compare.results import Outcome, Results, collect
from rlplus.compare.runs import Runner
from rlplus.terminal import Terminal

__all__ = ["BASE", "Comparison", "Outcome", "Results", "Runner", "load_comparison", "run_comparison"]
