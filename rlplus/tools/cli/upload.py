"""`rlplus push`."""

import argparse
import re
from pathlib import Path

from rlplus.tools.cli.common import Commands, quiet_imports


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    push = commands.add_parser("push", help="upload a finished run's model, card and results to the Hugging Face hub")
    push.add_argument("folder", metavar="RUN", help="output folder of a run")
    push.add_argument("repository", metavar="OWNER/NAME", help="a repository of models on the hub, made if it is new")
    push.add_argument(
        "--public", action="store_true", help="make a new one public, or add to a public one; default: private"
    )
    push.add_argument("--dry-run", action="store_true", help="print the card and the files, and upload nothing")
    push.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Upload, or print what would be."""
    from rlplus.train.config import check_run_folder

    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", args.repository):
        raise ValueError(f"want the repository as OWNER/NAME; got {args.repository!r}")
    folder = Path(args.folder)
    check_run_folder(folder)
    quiet_imports()
    from rlplus.common.terminal import Terminal
    from rlplus.tools.report.hub_upload import CARD, files_of, upload

    files, notes = files_of(folder)
    if args.dry_run:
        card = files[CARD]
        assert isinstance(card, bytes)
        sizes = {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in files.items()}
        listed = "\n".join(f"{size:>15,} bytes  {name}" for name, size in sizes.items())
        uploads = f"{card.decode()}\nNothing was uploaded to {args.repository}; these would be:\n{listed}"
        Terminal().print("\n".join([uploads, *notes]))
        return
    name = folder.resolve().name
    url = upload(args.repository, files, public=args.public, message=f"{name}, trained with rlplus")
    Terminal().print("\n".join([f"{len(files)} files of {folder} are in {url}", *notes]))
