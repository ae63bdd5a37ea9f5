"""`rlplus compare`."""

import argparse
from pathlib import Path

from rlplus.tools.cli.common import Commands, at_least, quiet_imports

OF_TRAINING = ("presets", "settings", "seeds", "first_seed", "jobs", "launcher", "report")


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    compare = commands.add_parser("compare", help="compare methods over seeds, trained for it or in runs that exist")
    compare.add_argument(
        "config",
        help="a comparison, such as configs/compare/gsm8k.yaml; a training configuration; or the folder of a run, and "
        "further ones behind it, each as FOLDER or NAME=FOLDER",
    )
    compare.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the training configuration")
    compare.add_argument("--reference", help="of runs that exist: the method to compare with; default: the last one")
    compare.add_argument("--presets", help="names with commas: of the comparison's methods, or of any presets")
    compare.add_argument("--settings", help="names with commas, of the comparison's settings; default: all")
    compare.add_argument("--seeds", type=at_least(1), help="how many; default: as the comparison says, or 5")
    compare.add_argument(
        "--first-seed", type=at_least(0), help="the first of them; default: as the comparison says, or 0"
    )
    compare.add_argument("--output", help="default: runs/compare/<name of the file>, or runs/compare/runs")
    compare.add_argument("--jobs", type=at_least(1), help="runs at a time; default 1")
    compare.add_argument("--launcher", help='in place of "python -m", such as "torchrun --nproc_per_node 8 -m"')
    compare.add_argument("--report", action="store_true", help="only write the report, from the runs that are finished")
    compare.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is not trained yet, unless the runs exist, and write the page."""
    presets = _names("--presets", args.presets)
    settings = _names("--settings", args.settings)
    quiet_imports(ranks=True)  # its children may be
    from rlplus.tools.compare.comparing import compare_past_runs, run_comparison
    from rlplus.tools.compare.past_runs import split_name

    if split_name(args.config) is not None:
        if given := [name for name in OF_TRAINING if getattr(args, name) not in (None, False)]:
            raise ValueError(f"--{given[0].replace('_', '-')} is for runs to be made; {args.config} is one that exists")
        compare_past_runs([args.config, *args.overrides], Path(args.output or "runs/compare/runs"), args.reference)
        return
    if args.reference is not None:
        raise ValueError("--reference is for runs that exist; a comparison's file has it in its studies")
    run_comparison(
        Path(args.config),
        Path(args.output or f"runs/compare/{Path(args.config).stem}"),
        presets=presets,
        settings=settings,
        seeds=args.seeds,
        first_seed=args.first_seed,
        overrides=args.overrides,
        jobs=args.jobs or 1,
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
