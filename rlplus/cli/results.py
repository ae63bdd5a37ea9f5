"""`rlplus report` and `rlplus compare`."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplus.cli.common import quiet_imports

if TYPE_CHECKING:
    from rlplus.cli.common import Commands

logger = logging.getLogger(__name__)


def add_report(commands: "Commands") -> None:
    """Add the arguments of `rlplus report`."""
    report = commands.add_parser("report", help="curves, results and samples of runs and evaluations as one HTML file")
    report.add_argument(
        "runs",
        nargs="+",
        metavar="FOLDER",
        help="output folders of runs or evaluations; or results.json of a comparison",
    )
    report.add_argument("-o", "--output", default="report.html", help="default: report.html")
    report.add_argument("--show", type=int, metavar="N", help="print samples of the N newest problems, write no file")
    report.add_argument("--step", type=int, help="with --show: those of the kept step nearest to this one")
    report.add_argument("--wrong", action="store_true", help="with --show: only problems with a wrong response")
    report.set_defaults(run=_report)


def add_compare(commands: "Commands") -> None:
    """Add the arguments of `rlplus compare`."""
    compare = commands.add_parser("compare", help="train several methods from one base, over seeds, and compare them")
    compare.add_argument("config", help="a comparison, such as configs/compare/gsm8k.yaml, or a training configuration")
    compare.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the training configuration")
    compare.add_argument("--presets", help="names with commas: of the comparison's methods, or of any presets")
    compare.add_argument("--settings", help="names with commas, of the comparison's settings; default: all")
    compare.add_argument("--seeds", type=int, help="how many; default: as the comparison says, or 5")
    compare.add_argument("--first-seed", type=int, help="the first of them; default: as the comparison says, or 0")
    compare.add_argument("--output", help="default: runs/compare/<name of the file>")
    compare.add_argument("--jobs", type=int, default=1, help="runs at a time; default 1")
    compare.add_argument("--launcher", help='in place of "python -m", such as "torchrun --nproc_per_node 8 -m"')
    compare.add_argument("--report", action="store_true", help="only write the report, from the runs that are finished")
    compare.set_defaults(run=_compare)


def _report(args: argparse.Namespace) -> None:
    from rlplus.config import check_output_folder, check_report_folder, check_samples_folder

    if args.show is not None and args.show < 1:
        raise ValueError(f"want --show at least 1; got {args.show}")
    for option, given in (("--step", args.step is not None), ("--wrong", args.wrong)):
        if given and args.show is None:
            raise ValueError(f"want --show with {option}, such as --show 5 --step 40 --wrong")
    check_output_folder(Path(args.output).parent, "--output")
    if any(Path(run).suffix == ".json" for run in args.runs):
        if len(args.runs) > 1 or args.show is not None:
            raise ValueError(f"want one file, without --show, to report on a comparison; got {' '.join(args.runs)}")
        return _report_comparison(Path(args.runs[0]), Path(args.output))
    labels = _labels(args.runs)
    for folder in labels.values():
        if args.show is None:
            check_report_folder(folder)
        else:
            check_samples_folder(folder, of_step=args.step is not None)
    if args.show is None:
        _write_page(labels, Path(args.output))
    else:
        _print_samples([*labels.values()], args.show, args.step, args.wrong)


def _report_comparison(results: Path, output: Path) -> None:
    quiet_imports()
    from rlplus.common.durable import write_text
    from rlplus.common.terminal import Terminal
    from rlplus.compare import Results, page_of

    title = results.resolve().parent.name if results.name == "results.json" else results.stem  # as its page has it
    page = page_of(Results.load(results), title)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page)
    Terminal().print(f"written to {output}")


def _print_samples(folders: Sequence[Path], most: int, step: int | None, wrong: bool) -> None:
    from rlplus.common.terminal import Terminal
    from rlplus.config import SAMPLES
    from rlplus.report import show_samples

    terminal = Terminal()
    for folder in folders:
        if len(folders) > 1:
            terminal.print(f"{folder}", style="bold underline")
        show_samples(folder / SAMPLES, most, terminal, step, wrong=wrong)


def _write_page(labels: Mapping[str, Path], output: Path) -> None:
    """A report on the folders by their labels; a damaged result is left out with a warning."""
    from rlplus.common.terminal import Terminal
    from rlplus.config import SAMPLES, is_run
    from rlplus.evaluation import Evaluation, load_results
    from rlplus.report import load_run, write_report

    results: dict[str, dict[str, Evaluation]] = {}
    runs, samples, warnings = {}, {}, list[str]()
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


def _labels(runs: Sequence[str]) -> dict[str, Path]:
    """The folders by their names, or by their paths where names are the same."""
    folders = [Path(run) for run in runs]
    names = [folder.resolve().name for folder in folders]
    same = len(set(names)) < len(names)
    return dict(zip(map(str, folders) if same else names, folders, strict=True))


def _compare(args: argparse.Namespace) -> None:
    for name, value, least in (
        ("--seeds", args.seeds, 1),
        ("--first-seed", args.first_seed, 0),
        ("--jobs", args.jobs, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"want {name} at least {least}; got {value}")
    presets, settings = _names("--presets", args.presets), _names("--settings", args.settings)
    quiet_imports()
    from rlplus.compare import run_comparison

    run_comparison(
        Path(args.config),
        Path(args.output or f"runs/compare/{Path(args.config).stem}"),
        presets=presets,
        settings=settings,
        seeds=args.seeds,
        first_seed=args.first_seed,
        overrides=args.overrides,
        jobs=args.jobs,
        launcher=args.launcher,
        only_report=args.report,
    )


def _names(option: str, text: str | None) -> list[str]:
    """The parts between commas, but empty ones. ValueError if the option was given and there are none."""
    names = [name for name in map(str.strip, (text or "").split(",")) if name]
    if text is not None and not names:
        raise ValueError(f"want names between commas with {option}; got {text!r}")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"want each name once with {option}; got {twice[0]!r} again")
    return names
