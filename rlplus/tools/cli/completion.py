"""`rlplus completion`: a script by which bash or zsh complete commands, options, their values and keys."""

import argparse
import re
import sys
from functools import partial

from rlplus.tools.cli.common import GPU_NAMES, Commands

KEYS = {
    "bash": "_rlplus_keys() {{ [[ -z $1 ]] || compgen -W '{keys}' -- \"$1\"; }}",
    "zsh": "_rlplus_keys() {{ compadd -S '' -- {keys}; _files; }}",
}
# shtab calls _rlplus_keys in a subshell, where it cannot keep bash from adding a space to a key's equals sign; and
# where it completes nothing, files are to be offered.
BASH = """
_rlplus() {
  _shtab_rlplus
  if [[ ${COMPREPLY[0]-} == *= ]]; then compopt -o nospace; fi
}
complete -o bashdefault -o default -F _rlplus rlplus
"""


def add(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. parser: of all commands."""
    completion = commands.add_parser("completion", help="print a script by which bash or zsh complete arguments")
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell that is to complete")
    completion.set_defaults(run=partial(run, commands, parser))


def run(commands: Commands, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Print the script. The parser cannot parse afterwards."""
    import shtab

    from rlplus.train.config import valid_keys

    known = [*valid_keys()]
    keys = " ".join(f"{key}=" for key in known if not any(other.startswith(f"{key}.") for other in known))
    for command in commands.choices.values():
        for action in command._actions:
            _complete(action)
    script = shtab.complete(parser, args.shell, preamble=KEYS[args.shell].format(keys=keys))
    if args.shell == "bash":
        script += BASH
    else:
        script = re.sub(r'"\(\*\)::?', '"*:', script)  # shtab's form of a list has one word
    sys.stdout.write(script)


def _complete(action: argparse.Action) -> None:
    """Say what shtab cannot read from the argument."""
    if action.dest == "gpu":
        action.choices = (*GPU_NAMES, "cpu")
    elif action.nargs == "?":  # an option whose value follows an equals sign
        action.nargs = 0
    elif action.nargs != 0 and not action.choices:
        keys = dict.fromkeys(KEYS, "_rlplus_keys")
        files = {"zsh": "_files"}
        vars(action)["complete"] = keys if action.dest == "overrides" else files
