"""The package as others get it: a wheel, an sdist, and next to Hugging Face's package ``kernels``."""

import os
import shutil
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parents[2]
PROBE = "rlplus/kernels/probe.py"  # added to the copy that is built, so that the link is tested with any kernels


def run(*command: str | Path, cwd: Path, path: Path | None = None, **variables: str) -> str:
    """Standard output of a Python process; an error in it fails the test with all that it wrote."""
    environment = {**os.environ, "PYTHONPATH": str(path) if path else "", **variables}
    done = processes.run([sys.executable, *command], cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads: building in the checkout would leave files there."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("rlplus", "kernels", "configs", "csrc", "bench", "experiments", "src"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (copy / "kernels" / "probe.py").write_text("import triton\n")
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without native code that ``build`` makes from the sdist that it makes from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", out, source, cwd=out, RLPLUS_EXT="0")
    assert [path.name for path in out.glob("*.tar.gz")]
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, source: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    links = ("kernels", "configs", "bench")  # rglob does not follow them
    folders = [source / "rlplus", *(source / "rlplus" / name for name in links)]
    kinds = ("*.py", "*.yaml", "schema.json", "models/*.json", "*.html", "report/page.*", "watch/watch.*", "py.typed")
    files = {path for folder in folders for kind in kinds for path in folder.rglob(kind)}
    assert names == {str(path.relative_to(source)) for path in files}
    assert {PROBE, "rlplus/configs/eval.yaml", "rlplus/py.typed"} <= names
    assert "rlplus/configs/models/Qwen--Qwen2.5-Math-7B.json" in names


@pytest.mark.slow
def test_every_module_imports_from_the_wheel(wheel: Path, installed: Path, tmp_path: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names}
    modules -= {f"rlplus.integrations.{name}" for name in ("openrlhf", "prime_rl", "trl", "verl")}  # their trainers
    script = """
import sys
from importlib import import_module
elsewhere = [name for name in sys.argv[2:] if not import_module(name).__file__.startswith(sys.argv[1])]
assert not elsewhere, elsewhere
"""
    run("-c", script, installed, *modules, cwd=tmp_path, path=installed)


def test_command_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "train" in run("-m", "rlplus", "--help", cwd=tmp_path, path=installed)


def test_the_losses_alone_name_the_line_that_installs_the_trainer(installed: Path, tmp_path: Path) -> None:
    """Without site-packages: nothing but the wheel and the standard library."""
    command = ("-S", "-m", "rlplus", "train", "run.yaml")
    done = processes.run([sys.executable, *command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)})
    assert done.returncode == 2
    assert "needs packages that are not installed (accelerate, deepspeed, " in done.stderr
    assert done.stderr.endswith(': pip install "rlplus[train]"\n')


@pytest.mark.slow
def test_bench_runs_from_the_wheel_and_installs_no_package_of_its_name(installed: Path, tmp_path: Path) -> None:
    assert not (installed / "bench").exists()
    assert "naive torch" in run(installed / "bin/rlplus-bench", "--list", cwd=tmp_path, path=installed)
    run("-m", "rlplus.bench", "--suite", "quick", "--only", "torch", "--repeats", "1", cwd=tmp_path, path=installed)
    assert (tmp_path / "runs/bench/quick.json").exists()


EDITABLE = """
import sys
from setuptools.build_meta import build_editable
build_editable(sys.argv[1])
"""


def test_an_editable_installation_is_a_path_that_editors_follow(source: Path, tmp_path: Path) -> None:
    """With nothing but rlplus in it: another folder of the checkout could stand for a package of its name."""
    run("-c", EDITABLE, tmp_path, cwd=source, RLPLUS_EXT="0")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if ".dist-info/" not in name)
        place = file.read(name).decode().strip()
    assert name.endswith(".pth")
    assert [each.name for each in Path(place).iterdir() if each.suffix != ".egg-info"] == ["rlplus"]
    script = """
import rlplus
from rlplus.common.errors import install_command
assert rlplus.__file__.startswith({place!r}), rlplus.__file__
assert install_command("train") == 'pip install -e ".[train]"'
"""
    run("-c", script.format(place=place), cwd=tmp_path, path=Path(place))


def build_wheel(source: Path, out: Path, **variables: str) -> Path:
    run("-m", "build", "--no-isolation", "--outdir", out, source, cwd=out, **variables)
    return next(out.glob("*.whl"))


def without_library(source: Path, out: Path) -> Path:
    """A copy of the source in which nothing is built yet."""
    return Path(shutil.copytree(source, out / "copy", symlinks=True, ignore=shutil.ignore_patterns("*.so", "build")))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_native_library_is_in_the_wheel_where_there_is_a_compiler(source: Path, tmp_path: Path) -> None:
    wheel = build_wheel(without_library(source, tmp_path), tmp_path, RLPLUS_EXT="1")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = "from rlplus.loss.backends import native; assert native.load(); print(native.LIBRARY)"
    assert run("-c", script, cwd=tmp_path, path=tmp_path / "site").strip() == str(tmp_path / "site/rlplus/_C.so")


@pytest.mark.slow
def test_a_failed_build_leaves_a_working_wheel_unless_it_is_asked_for(source: Path, tmp_path: Path) -> None:
    copy = without_library(source, tmp_path)
    wheel = build_wheel(copy, tmp_path, RLPLUS_EXT="", CXX="false")
    assert "rlplus/_C.so" not in zipfile.ZipFile(wheel).namelist()
    with pytest.raises(AssertionError, match=r"command 'false' failed|exit code 1"):
        build_wheel(copy, tmp_path, RLPLUS_EXT="1", CXX="false")


SLOW = "{'torch', 'numpy', 'transformers', 'deepspeed', 'vllm', 'pyarrow', 'rich'}"
NAMES = f"""
import sys
import rlplus
assert not {SLOW} & set(sys.modules), "import rlplus"
assert {{"Objective", "linear_policy_loss", "loss", "__version__"}} <= set(dir(rlplus))
rlplus.Objective.preset("rlplus")
import rlplus.train.config
assert not {SLOW} & set(sys.modules), "presets and configurations"
import rlplus.loss
for module in (rlplus, rlplus.loss):
    assert all(getattr(module, name) is not None for name in module.__all__)
    try:
        module.nothing
    except AttributeError as error:
        assert "has no attribute 'nothing'" in str(error)
    else:
        raise AssertionError
assert rlplus.policy_loss is rlplus.loss.objective.definition.policy_loss and "policy_loss" in vars(rlplus)
assert not {{"transformers", "deepspeed", "vllm", "pyarrow"}} & set(sys.modules)
"""
COMPILED = """
import torch
import rlplus
def loss(hidden, weight, target, zero, external):
    constants = {"old_logprob": None, "advantage": zero + 1, "token_weight": zero + 1, "external": external}
    return rlplus.linear_policy_loss(hidden, weight, target, **constants, backend="torch").loss
external = torch.tensor([True, False, False])
inputs = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2]), torch.zeros(3), external
compiled = torch.compile(loss, fullgraph=True, backend="eager")(*inputs)  # before anything else has used the package
assert "linear_policy_loss" in dir(torch.ops.rlplus)
torch.testing.assert_close(compiled, loss(*inputs))
"""


def test_import_is_cheap() -> None:
    """Neither `import rlplus` nor a configuration's check imports torch; every public name is still there."""
    run("-c", NAMES, cwd=ROOT)


@pytest.mark.slow
def test_the_first_use_may_be_inside_a_compiled_function() -> None:
    """The operators are registered on first use, which torch.compile may be the first to see."""
    run("-c", COMPILED, cwd=ROOT)


def test_kernels_is_a_link_to_a_folder_that_is_no_package() -> None:
    assert (ROOT / "rlplus/kernels").readlink() == Path("../kernels")
    assert not (ROOT / "kernels/__init__.py").exists()


FAKE_KERNELS = """
from importlib.metadata import version
__version__ = version("kernels")
class Anything:  # a maker of decorators that change nothing, a class, an enumeration
    def __call__(self, *args, **kwargs): return lambda decorated: decorated
    def __getattr__(self, name): return self
    def __or__(self, other): return self
    __ror__ = __or__
def __getattr__(name): return Anything()
"""
USE_QWEN2 = """
import sys
from pathlib import Path
from transformers.utils.import_utils import KERNELS_MIN_VERSION, is_kernels_available
if len(sys.argv) > 1:
    sys.path.append(sys.argv[1])  # behind the checkout, as site-packages is
    folder = Path(sys.argv[1], f"kernels-{KERNELS_MIN_VERSION}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: kernels\\nVersion: {KERNELS_MIN_VERSION}\\n")
from transformers import Qwen2Config, Qwen2ForCausalLM
sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1))
print(is_kernels_available(), getattr(sys.modules.get("kernels"), "__file__", None))
"""


@pytest.mark.slow
def test_hugging_face_kernels_is_not_shadowed(tmp_path: Path) -> None:
    """transformers imports Hugging Face's ``kernels`` where it is installed; our folder must not stand in its way."""
    module = tmp_path / "kernels/__init__.py"
    module.parent.mkdir()
    module.write_text(FAKE_KERNELS)
    assert run("-c", USE_QWEN2, tmp_path, cwd=ROOT).strip() == f"True {module}"


@pytest.mark.slow
def test_our_folder_is_not_taken_for_hugging_face_kernels() -> None:
    if any(distribution.name == "kernels" for distribution in distributions()):
        pytest.skip("Hugging Face's kernels is installed")
    assert run("-c", USE_QWEN2, cwd=ROOT).strip() == "False None"
