"""`rlplus report`."""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path

from rlplus.tools.cli.common import Commands, labels_of

logger = logging.getLogger(__name__)


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    report = commands.add_parser("report", help="curves, results and samples of runs and evaluations as one HTML file")
    report.add_argument(
        "runs",
        nargs="+",
        metavar="FOLDER",
        help="output folders of runs or evaluations; or results.json of a comparison",
    )
    report.add_argument("-o", "--output", default="report.html", help="default: report.html")
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the page."""
    from rlplus.train.config import check_output_folder, check_report_folder

    check_output_folder(Path(args.output).parent, "--output")
    if any(Path(run).suffix == ".json" for run in args.runs):
        if len(args.runs) > 1:
            raise ValueError(f"want one file to report on a comparison; got {' '.join(args.runs)}")
        return _report_comparison(Path(args.runs[0]), Path(args.output))
    labels = labels_of(args.runs)
    for folder in labels.values():
        check_report_folder(folder)
    _write_page(labels, Path(args.output))


def _report_comparison(results: Path, output: Path) -> None:
    from rlplus.common.durable import write_text
    from rlplus.common.terminal import Terminal
    from rlplus.tools.compare.outcomes import Results
    from rlplus.tools.compare.page import page_of

    title = results.resolve().parent.name if results.name == "results.json" else results.stem  # the title of its page
    page = page_of(Results.load(results), title)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page)
    Terminal().print(f"written to {output}")


def _write_page(labels: Mapping[str, Path], output: Path) -> None:
    """A report on the folders by their labels; a damaged result is left out with a warning."""
    from rlplus.common.terminal import Terminal
    from rlplus.tools.report import load_run, write_report
    from rlplus.train.config import SAMPLES, is_run
    from rlplus.train.evaluation.results import Evaluation, load_results

    results: dict[str, dict[str, Evaluation]] = {}
    runs = {}
    samples = {}
    warnings = list[str]()
    for label, folder in labels.items():
        damaged: list[str] = []
        for name, result in load_results(folder, damaged).items():
            results.setdefault(name, {})[label] = result
        warnings += [f"{label}: this result is left out: {what}" for what in damaged]
        if is_run(folder):
            runs[label] = load_run(folder)
        else:
            samples[label] = folder / SAMPLES
    if warnings and not (runs or results):
        raise ValueError("\n".join(warnings))
    for warning in warnings:
        logger.warning(warning)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_report(output, runs, results, title=", ".join(labels), samples=samples, warnings=warnings)
    Terminal().print(f"written to {output}")
