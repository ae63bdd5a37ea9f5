"""`rlplus init`."""

import argparse
from pathlib import Path

from rlplus.common import activity
from rlplus.tools.cli.common import GPUS_HELP, KNOWN_GPUS, Commands, quiet_imports, saying_phases


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    init = commands.add_parser("init", help="write a first configuration, for your model, data and GPU, that fits")
    init.add_argument("--model", required=True, help="a Hugging Face folder, or a name on the hub")
    init.add_argument("--data", required=True, help="a file of prompts and answers: JSON lines or Parquet")
    init.add_argument("--gpu", help=KNOWN_GPUS)
    init.add_argument("--gpus", type=int, help=GPUS_HELP)
    init.add_argument("--out", default="run.yaml", help="the file to write, run.yaml by default; never overwritten")
    init.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fixed: rollout.group_size=16")
    init.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the configuration, and print the choices and the next command."""
    from rlplus.train.config import load_config, write_new

    out = Path(args.out)
    if out.exists():
        raise ValueError(f"want --out a new file; got {out}, which exists")
    if not out.parent.is_dir():
        raise ValueError(f"want --out a file in a folder that exists; got {out}")
    quiet_imports()
    from rlplus.common.terminal import Terminal
    from rlplus.tools.init import start
    from rlplus.tools.plan import make_cluster

    cluster = make_cluster(args.gpus, args.gpu)
    activity.current.begin("first settings")
    with saying_phases("rlplus init"):
        begun = start(args.model, args.data, cluster, args.overrides, here=args.gpu is None)
    write_new(out, begun.text)
    assert load_config(out) == begun.config, "a written configuration is the chosen one"
    console = Terminal()
    console.print(f"{out}: {args.model} on {cluster.name}")
    if args.gpu is None and cluster.cpu:
        console.print("- this machine has no GPU, so its CPU trains: name the GPUs of another one by --gpu and --gpus")
    for reason in begun.reasons:
        console.print(f"- {reason}")
    if begun.config.data.demonstration is not None:
        console.print("- whether demonstrations help depends on their form: --logprob of the plan below measures it")
    launch = "rlplus" if cluster.gpus == 1 else f"torchrun --nproc_per_node {cluster.gpus} -m rlplus"
    given = f" --gpus {args.gpus}" if args.gpus else ""
    given += f" --gpu {args.gpu}" if args.gpu else ""
    console.print(f"Next: rlplus plan {out} --data{given}, then {launch} train {out}")
