"""The figure of a comparison on a pretrained model: the reward of its rollouts, and pass@1 before and after."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from rlplus.tools.compare.config import BASE
from rlplus.tools.compare.outcomes import Results
from rlplus.train.evaluation.results import Evaluation, pooled_pass_at

REWARD = "reward/internal"  # the mean reward of sampled responses


def draw(results: Results, path: Path) -> None:
    """Write two panels to a file, the same bytes each time: a line for each run; their mean, its interval and dots."""
    methods = list(dict.fromkeys((BASE, *(one.method for one in results.outcomes))))
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "rlplus", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.4), layout="tight")
        curves, bars = figure.subplots(1, 2)
        for place, method in enumerate(methods):
            runs = [one for one in results.outcomes if one.method == method]
            for seed, one in enumerate(runs):
                if REWARD in one.curves:
                    steps, values = one.curves[REWARD]
                    curves.plot(steps, values, color=f"C{place}", label=None if seed else method)
            evaluations = [evaluation for one in runs for evaluation in one.results.values()]
            if evaluations:
                same = len({tuple(evaluation.problems) for evaluation in evaluations}) == 1
                found = pooled_pass_at(evaluations, 1, same_problems=same)
                limits = [[found.mean - found.low], [found.high - found.mean]]
                bars.bar(place, found.mean, yerr=limits, capsize=4, color=f"C{place}", alpha=0.6)
                scores = [pass_at_1(evaluation) for evaluation in evaluations]
                bars.plot([place] * len(scores), scores, "k.", markersize=4)
        curves.set(title="Reward of the sampled responses", xlabel="step", ylim=(0, None))
        bars.set(title="GSM8K test problems, pass@1, 95 % intervals", ylim=(0, None))
        bars.set_xticks(range(len(methods)), methods)
        curves.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def pass_at_1(evaluation: Evaluation) -> float:
    """The share of right samples."""
    return sum(evaluation.correct) / sum(evaluation.n)
