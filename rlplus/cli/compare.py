"""`rlplus compare`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rlplus.cli.common import quiet_imports

if TYPE_CHECKING:
    from rlplus.cli.common import Commands


def add(commands: "Commands") -> None:
    """Add the command's arguments."""
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
    compare.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is not trained yet, and write the page."""
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
