"""`rlplus watch`."""

import argparse

from rlplus.tools.cli.common import Commands, labels_of

PORT = 8420


def add(commands: Commands) -> None:
    """Add the command's arguments."""
    watch = commands.add_parser("watch", help="a page on this machine that follows runs while they train")
    watch.add_argument("runs", nargs="+", metavar="RUN", help="output folders of runs, beside each other")
    watch.add_argument("--port", type=int, default=PORT, help=f"on 127.0.0.1; 0 takes a free one; default {PORT}")
    watch.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"want --port from 0 to {(1 << 16) - 1}; got {args.port}")
    from rlplus.common.terminal import Terminal
    from rlplus.tools.watch import FollowedRun, View, WatchServer, check_watched

    labels = labels_of(args.runs)
    for folder in labels.values():
        check_watched(folder)
    view = View([FollowedRun(label, folder) for label, folder in labels.items()])
    try:
        server = WatchServer(view, args.port)
    except OSError as error:
        raise ValueError(f"want --port a free one, 0 takes any; {args.port} is none: {error.strerror}") from error
    with server:
        Terminal().print(f"following {', '.join(labels)}: {server.url} (Ctrl-C ends this)")
        server.serve_forever()
