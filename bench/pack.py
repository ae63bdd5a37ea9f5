"""python -m bench.pack [PACKAGE...]: what a machine without a network and without git needs beside the source tree.

Makes the folder gpu-pack anew: REVISION, the commit for the results, and peers, the packages (default: the small peers
of the benchmark) for Python 3.12 on Linux x86-64, without those that they need. Carry the folder into the source tree
there; bench/gpu.sh finds it. Packs above the limit are refused, with the size of each package.
"""

import shutil
import subprocess
import sys

from rlplus.loss.verdicts import versions

from .machine import PACK, package_root, revision

SMALL = ("liger-kernel", "cut-cross-entropy", "trl", "verl")
LIMIT_MB = 50  # size of the files there, which travel with a source tree of 10 MB
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")


def main(packages: list[str]) -> int:
    root = package_root()
    folder = root / PACK
    shutil.rmtree(folder, ignore_errors=True)
    peers = folder / "peers"
    peers.mkdir(parents=True)
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--implementation", "cp"]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    options += ["--python-version", "3.12", "--target", str(peers)]
    total = 0.0
    for package in packages or SMALL:
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options, package])
        if done.returncode:
            return done.returncode
        size = sum(file.stat().st_size for file in peers.rglob("*") if file.is_file()) / 1e6
        print(f"{package}: {size - total:.1f} MB")
        total = size
    (folder / "REVISION").write_text(f"{revision()} {versions()['kernels']}\n")
    print(f"{folder}: {total:.1f} MB, of revision {revision()}")
    if total > LIMIT_MB:
        print(f"want at most {LIMIT_MB} MB; leave a package out", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
