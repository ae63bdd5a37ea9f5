"""python hub/build.py FOLDER: the losses as a kernel for Hugging Face's `kernels`, in FOLDER, which must be new.

The layout is of https://huggingface.co/docs/kernels/kernel-requirements for Python-only kernels: `benchmarks/`, and
a build variant per backend with the package's files, and `metadata.json` with their digests. Imports become relative,
and ops get a namespace of their own, so that several versions can be loaded beside each other and an installed rlplus.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "rlplus"
VERSION = 0  # a kernel whose interface may change, by the hub's convention
BACKENDS = ("cpu", "cuda")
PARTS = ("__init__.py", *(f"common/{name}.py" for name in ("__init__", "durable", "errors", "lazy", "textfiles")))
FOLDERS = ("loss", "kernels")
START = '''"""The losses of rlplus: language-model heads from hidden states to loss, without stored logits."""

from .rlplus import *
from .rlplus import __all__, __version__
'''


def sources() -> dict[str, str]:
    """Paths below the package, and texts, of what the losses need."""
    package = ROOT / "rlplus"
    files = [package / part for part in PARTS]
    files += [file for folder in FOLDERS for file in sorted((package / folder).rglob("*.py"))]
    return {file.relative_to(package).as_posix(): file.read_text() for file in files}


def portable(path: str, text: str, namespace: str) -> str:
    """A module of the package that works under any name: relative imports, and ops in the namespace."""
    dots = "." * (path.count("/") + 1)

    def relative(match: re.Match[str]) -> str:
        start, rest = match.groups()
        return f"{start}from {dots}{rest or ''} import "

    text = re.sub(r"^(\s*)from rlplus(?:\.([\w.]+))? import ", relative, text, flags=re.MULTILINE)
    text = text.replace('"rlplus::', f'"{namespace}::')
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == NAME for name in names):
            raise ValueError(f"want relative imports only; got another in {path}, line {node.lineno}")
    return text


def write_variant(folder: Path, backend: str) -> None:
    given = sources()
    state = hashlib.sha256("".join(f"{path}\n{text}" for path, text in given.items()).encode()).hexdigest()[:10]
    namespace = f"_{NAME}_{backend}_{state}"
    files = {"__init__.py": START}
    files |= {f"{NAME}/{path}": portable(path, text, namespace) for path, text in given.items()}
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    hashes = {path: hashlib.sha256(text.encode()).digest() for path, text in sorted(files.items())}
    digest = {path: base64.b64encode(value).decode() for path, value in hashes.items()}
    metadata = {
        "name": NAME, "id": namespace, "version": VERSION, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": backend}, "digest": {"algorithm": "sha256", "files": digest},
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"want a folder that does not exist; got {folder}")
    for backend in BACKENDS:
        write_variant(folder / "build" / f"torch-{backend}", backend)
    here = Path(__file__).parent
    (folder / "benchmarks").mkdir()
    shutil.copy(here / "benchmark_head.py", folder / "benchmarks")
    shutil.copy(here / "README.md", folder)


if __name__ == "__main__":
    main()
