"""Shell scripts that start verl, run by bash with stand-ins for the programs."""

import shutil
from pathlib import Path

import processes

BASH = shutil.which("bash")
VERL = "python3 -m verl.trainer.main_ppo"
STAND_IN = 'python3() { [ "$1" = -m ] && printf "%s\\1" "$@" && printf "\\2"; }\nsource() { X=9; A=(a.b=9); }\n'
STAND_IN += "python() { python3 \"$@\"; }\ntee() { while read -r -d $'\\2' X; do printf '%s\\2' \"$X\"; done; }\n"


def runs(text: str, flag: str, folder: Path) -> list[str]:
    """The arguments that bash passes to verl; none where it does not come as far."""
    assert BASH
    (folder / "other.sh").write_text("X=9\nA=(a.b=9)\n")
    (path := folder / "run.sh").write_text(STAND_IN + text)
    out = processes.run([BASH, str(path)], cwd=folder, env={"FLAG": flag, "HOME": "~", "PATH": "/nonexistent"}).stdout
    return next((call.split("\1")[2:-1] for call in out.split("\2") if "main_" in call), [])


def passed(text: str, flag: str, folder: Path) -> list[str]:
    """The arguments that bash passes to verl."""
    arguments = runs(text, flag, folder)
    assert arguments
    return arguments
