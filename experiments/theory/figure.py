"""The figure of the coefficients on the current policy."""

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlplus.loss import Objective

from .coefficients import VOCABULARY, Coefficient, from_estimate, from_objective, on_policy, peak, variants

DRAWN = ("paper", "LUFFY", "actual shares, 1:7", "true p_ω", "uniform 1/V", "Lemma B.1")


def draw(path: Path) -> None:
    """Write three panels to a file, the same bytes each time: the paper's form, its estimate of p_ω, and variants."""
    parts: dict[str, Coefficient] = {
        "r · C, paper": from_objective(Objective()),
        "r = 4p / (3p + 1)": from_objective(Objective(gamma=0.0)),
        "C = √(1 − p), Lemma B.1": from_objective(Objective(external="nll")),
        "r · C · (1 − p), of the logit": from_objective(Objective(gamma=1.5)),
    }
    estimates = {
        f"prior {prior:g}, uniform {text}": from_estimate(prior=prior, uniform=uniform)
        for prior, uniform, text in ((0.5, 1.0, "1"), (0.1, 1.0, "1"), (0.9, 1.0, "1"), (0.5, 1 / VOCABULARY, "1/V"))
    }
    known = {variant.name: variant.coefficient for variant in variants(VOCABULARY)}
    with matplotlib.rc_context(
        {"font.size": 9, "svg.hashsalt": "rlplus", "svg.fonttype": "none", "path.simplify_threshold": 0.2}
    ):
        figure = Figure(figsize=(12, 4.2), layout="tight")
        axes = figure.subplots(1, 3, sharey=True)
        panel(axes[0], "The paper's update", parts, torch.linspace(0.0025, 1, 400, dtype=torch.float64))
        low = torch.logspace(-6, 0, 181, dtype=torch.float64)
        panel(axes[1], "The estimate of p_ω: prior and uniform", estimates, low)
        panel(axes[2], "Variants", {name: known[name] for name in DRAWN}, low)
        for name, place in (("r · C, paper", (-30, -12)), ("r · C · (1 − p), of the logit", (0, 5))):
            at, most = peak(parts[name])
            axes[0].plot(at, most, "ko", markersize=3)
            axes[0].annotate(f"{most:.3f} at {at:.3f}", (at, most), place, textcoords="offset points")
        axes[0].set(ylabel="coefficient of A ∇ log π", ylim=(0, 1.4))
        for axis in axes[1:]:
            axis.set_xscale("log")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def panel(axis: Axes, title: str, coefficients: dict[str, Coefficient], p: torch.Tensor) -> None:
    """Lines of the coefficients over p, on the current policy with p_ω = 1."""
    for name, coefficient in coefficients.items():
        axis.plot(p, on_policy(coefficient, p), label=name)
    axis.set(title=title, xlabel="p")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=2, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
