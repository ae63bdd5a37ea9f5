"""python -m bench.pack [PACKAGE...]: what a machine without a network and without git needs beside the source tree.

Makes the folder gpu-pack anew, for Python 3.12 on Linux x86-64: REVISION, the commit for the results; peers, the
packages (default: the small peers of the benchmark); trainer, what the trainer needs beside transformers and pyarrow.
What the packages need is left out. Carry the folder into the source tree there; bench/gpu.sh finds it. Packs above the
limit are refused, with the size of each package.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rlplus.loss.guard.verdicts import versions

from .machine import PACK, package_root, revision

SMALL = ("liger-kernel", "cut-cross-entropy", "trl", "verl")
TRAINER = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "hjson", "math-verify",
    "latex2sympy2-extended", "antlr4-python3-runtime", "peft",
)  # fmt: skip
DEEPSPEED = "deepspeed>=0.19.8,<0.20"  # published as sources, in which nothing is compiled
LIMIT_MB = 50  # size of the files there, which travel with a source tree of 10 MB
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")


def main(packages: list[str]) -> int:
    root = package_root()
    folder = root / PACK
    shutil.rmtree(folder, ignore_errors=True)
    built = folder / "built"
    built.mkdir(parents=True)
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(built)]
    if status := subprocess.run([*wheel, DEEPSPEED], env=environment).returncode:
        return status
    (deepspeed,) = map(str, built.glob("*.whl"))
    total = 0.0
    for name, wanted in (("peers", packages or SMALL), ("trainer", (*TRAINER, deepspeed))):
        (folder / name).mkdir()
        for package in wanted:
            if status := install(package, folder / name):
                return status
            size = sum(file.stat().st_size for file in folder.glob("[pt]*/**/*") if file.is_file()) / 1e6
            print(f"{Path(package).name}: {size - total:.1f} MB")
            total = size
    shutil.rmtree(built)
    (folder / "REVISION").write_text(f"{revision()} {versions()['kernels']}\n")
    print(f"{folder}: {total:.1f} MB, of revision {revision()}")
    if total > LIMIT_MB:
        print(f"want at most {LIMIT_MB} MB; leave a package out", file=sys.stderr)
        return 1
    return 0


def install(package: str, target: Path) -> int:
    """Status of pip."""
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--implementation", "cp"]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    options += ["--python-version", "3.12", "--target", str(target)]
    return subprocess.run([sys.executable, "-m", "pip", "install", *options, package]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
