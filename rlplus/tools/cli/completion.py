"""`rlplus completion`: a script by which bash or zsh complete commands, options, their values and keys."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlplus.tools.cli.common import GPU_NAMES

if TYPE_CHECKING:
    from rlplus.tools.cli.common import Commands

Parsers = Mapping[str, argparse.ArgumentParser]

BASH = """\
# Completion of rlplus for bash, by `rlplus completion bash`.
_rlplus() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command='' given=0 options='' keys='' i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [[ ${{COMP_WORDS[i]}} == -* ]]; then continue; fi
    if [[ -z $command ]]; then command=${{COMP_WORDS[i]}}; else given=$((given + 1)); fi
  done
  case "$command $before" in
{values}
  esac
  case $command in
    '') COMPREPLY=($(compgen -W '{commands} --help --version' -- "$word")); return ;;
{options}
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [[ -n $keys && -n $word && $given -gt 0 ]]; then
    COMPREPLY=($(compgen -W '{keys}' -- "$word"))
    if [[ ${{#COMPREPLY[@]}} -gt 0 ]]; then compopt -o nospace; fi
  fi
}}
complete -o bashdefault -o default -F _rlplus rlplus
"""  # an empty COMPREPLY stands for names of files

ZSH = """\
#compdef rlplus
# Completion of rlplus for zsh, by `rlplus completion zsh`.
_rlplus_overrides() {{
  compadd -S '' -- {keys}
  _files
}}
_rlplus() {{
  local -a commands=(
{commands}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  shift words
  (( CURRENT-- ))
  case $words[1] in
{options}
  esac
}}
if [[ $funcstack[1] == _rlplus ]]; then _rlplus "$@"; else compdef _rlplus rlplus; fi
"""


def add(commands: "Commands") -> None:
    """Add the command's arguments."""
    completion = commands.add_parser("completion", help="print a script by which bash or zsh complete arguments")
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell that is to complete")
    completion.set_defaults(run=partial(run, commands))


def run(commands: "Commands", args: argparse.Namespace) -> None:
    """Print the script."""
    from rlplus.train.config import valid_keys

    known = [*valid_keys()]
    keys = [f"{key}=" for key in known if not any(other.startswith(f"{key}.") for other in known)]
    if args.shell == "bash":
        sys.stdout.write(_bash(commands.choices, keys))
    else:
        helps = {action.dest: action.help or "" for action in commands._choices_actions}
        sys.stdout.write(_zsh(commands.choices, helps, keys))


def _bash(parsers: Parsers, keys: Sequence[str]) -> str:
    values, options = [], []
    for name, parser in parsers.items():
        for action in _actions(parser):
            chosen = f"COMPREPLY=($(compgen -W '{words}' -- \"$word\")); " if (words := _words(action)) else ""
            if action.option_strings and action.nargs is None:  # one that wants a value, a name of a file or a choice
                patterns = "|".join(f"'{name} {each}'" for each in action.option_strings)
                values.append(f"    {patterns}) {chosen}return ;;")
            elif chosen:
                values.append(f"    '{name} '*) {chosen}return ;;")
        flags = " ".join(each for action in _actions(parser) for each in action.option_strings)
        options.append(f"    {name}) options='{flags}'{' keys=1' if _has_overrides(parser) else ''} ;;")
    return BASH.format(
        commands=" ".join(parsers), values="\n".join(values), options="\n".join(options), keys=" ".join(keys)
    )


def _zsh(parsers: Parsers, helps: Mapping[str, str], keys: Sequence[str]) -> str:
    commands = (f"    {_quoted(f'{name}:{helps[name]}')}" for name in parsers)
    options = (f"    {name}) _arguments {' '.join(map(_quoted, _zsh_arguments(parsers[name])))} ;;" for name in parsers)
    return ZSH.format(commands="\n".join(commands), options="\n".join(options), keys=" ".join(map(_quoted, keys)))


def _zsh_arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Specifications for zsh's _arguments."""
    for action in _actions(parser):
        text = (action.help or "").replace("[", r"\[").replace("]", r"\]").replace("%%", "%")
        values = f"({words})" if (words := _words(action)) else "_files"
        value = "" if action.nargs == 0 else f"::value:{values}" if action.nargs == "?" else f":value:{values}"
        equals = "=-" if action.nargs == "?" else ""
        yield from (f"{each}{equals}[{text}]{value}" for each in action.option_strings)
        if not action.option_strings and action.dest != "overrides":
            yield f"{'*' if action.nargs == '+' else 1}:{action.dest}:{values}"
    if _has_overrides(parser):
        yield "*:key=value:_rlplus_overrides"


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments that the command's help shows."""
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _has_overrides(parser: argparse.ArgumentParser) -> bool:
    return any(action.dest == "overrides" for action in parser._actions)


def _words(action: argparse.Action) -> str:
    """The values that are offered, between spaces."""
    return " ".join(map(str, action.choices or ((*GPU_NAMES, "cpu") if action.dest == "gpu" else ())))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
