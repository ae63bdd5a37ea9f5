"""Tunings: their files, the heads that they apply to, the effect of each part of a tiling, and the tuning of a run."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from head_cases import EVERYTHING, check_precision, on_device, run, sample, tensors
from trainer_runs import run_config

from rlplus import linear_logprob, use_tuning
from rlplus.kernels import exponentials
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import DEFAULT, GRADIENT, PROGRAMS, STATISTICS, TILES, Rows, Tiling
from rlplus.loss import tuning
from rlplus.loss.backends.ways import Way, chunk_rows
from rlplus.loss.head import Head
from rlplus.loss.tuning import Kind, cached_file, read, record_of, usable, write
from rlplus.trainer import open_run
from rlplus.trainer.run_tuning import resume

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, H = 70, 16
TILED = Tiling(
    statistics=STATISTICS[1], gradient=GRADIENT[2], programs=PROGRAMS[2], forward=TILES[8][2], loss=TILES[9][0],
    rows=Rows(128, 10**9),
)  # fmt: skip


@pytest.fixture(autouse=True)
def none_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_in_use", {})


@pytest.fixture
def kind() -> Kind:
    return tuning.kind_of(torch.device(DEVICE), torch.float32, V, H)


@pytest.fixture
def file(kind: Kind, tmp_path: Path) -> Path:
    write(tmp_path / "below/tuning.json", record_of(kind, TILED, [{"part": "row gradient", "status": "ok"}]))
    return tmp_path / "below/tuning.json"


# ---- files


@pytest.mark.parametrize("tiling", [DEFAULT, TILED, DEFAULT._replace(loss="vendor")])
def test_a_file_holds_what_was_written(tiling: Tiling, kind: Kind, tmp_path: Path) -> None:
    write(tmp_path / "one", record_of(kind, tiling, []))
    write(tmp_path / "one", record_of(kind, tiling, []))
    assert usable(read(tmp_path / "one"), kind, "one") == (tiling, "")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], str]:
    """The file's text with that value at a place in it."""

    def change(record: dict[str, Any]) -> str:
        place = record
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return json.dumps(record)

    return change


def without(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda record: json.dumps({name: value for name, value in record.items() if name != key})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "nothing": (lambda record: "", "Expecting value"),
    "cut": (lambda record: json.dumps(record)[:-9], "Expecting"),
    "nested": (lambda record: "[" * 60_000, "recursion"),
    "a list": (lambda record: json.dumps([record]), "list indices"),
    "for what": (without("for"), "no 'for'"),
    "no tiling": (without("tiling"), "no 'tiling'"),
    "no versions": (without("versions"), "no 'versions'"),
    "versions": (put("versions", value=[1]), "cannot convert|not iterable"),
    "another field": (put("tiling", "speed", value=1), "unexpected keyword argument 'speed'"),
    "half a block": (put("tiling", "gradient", value={"BLOCK_V": 4096}), "missing 1 required positional argument"),
    "a block": (put("tiling", "statistics", "BLOCK_V", value=4000), r"BLOCK_V=4000, num_warps=4\), which is none of"),
    "warps": (put("tiling", "gradient", "num_warps", value="8"), "num_warps='8'.*none of"),
    "programs": (put("tiling", "programs", value=10**9), "1000000000, which is none of"),
    "a tile": (put("tiling", "forward", "num_stages", value=9), "num_stages=9.*none of"),
    "another tile": (put("tiling", "loss", "BLOCK_V", value=96), "BLOCK_V=96.*none of"),
    "no tile": (put("tiling", "loss", value="mine"), "want a tile, 'vendor' or null"),
    "no rows": (put("tiling", "rows", "rows", value=0), "rows=0.*want whole numbers > 0"),
    "half a row": (put("tiling", "rows", "rows", value=12.5), "rows=12.5.*want whole numbers > 0"),
}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"want a tuning by `rlplus-bench tune`; got .*missing.json: no such file"):
        use_tuning(tmp_path / "missing.json")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused(damage: str, file: Path) -> None:
    change, message = DAMAGE[damage]
    file.write_text(change(read(file)))
    with pytest.raises(ValueError, match=f"want a tuning by `rlplus-bench tune` in {file}; got .*({message})"):
        use_tuning(file)
    assert not tuning._in_use


def test_numbers_are_those_of_the_table(file: Path, kind: Kind) -> None:
    file.write_text(put("tiling", "programs", value=float(TILED.programs))(read(file)))
    tiling, _ = usable(read(file), kind, "")
    assert tiling is not None
    assert type(tiling.programs) is int


@pytest.mark.parametrize("other", [{"device": "NVIDIA Other"}, {"dtype": "bfloat16"}, {"V": 71}, {"H": 24}])
def test_a_file_for_something_else_is_refused(other: dict[str, Any], file: Path, kind: Kind) -> None:
    want = kind._replace(**other)
    with pytest.raises(ValueError, match=re.escape(f"want a tuning for {want}; here has one for {kind}")):
        usable(read(file), want, "here")


def test_another_device_than_the_current_one_is_refused(file: Path, kind: Kind) -> None:
    write(file, record_of(kind._replace(device="NVIDIA Other"), TILED, []))
    with pytest.raises(ValueError, match=f"want a tuning for {kind.device}, .* has one for NVIDIA Other, "):
        use_tuning(file)


@pytest.mark.parametrize("name", ["torch", "triton", "driver", "kernels"])
def test_a_file_of_other_versions_is_ignored_with_one_warning(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(put("tiling", "programs", value=77)(read(file)))  # the candidates have changed, too
    now = tuning.versions() | {name: "9"}
    monkeypatch.setattr(tuning, "versions", lambda: now)
    with caplog.at_level(logging.WARNING, "rlplus"):
        use_tuning(file)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the tuning in {file} is not used, it was made with {name} ")
    assert line.endswith(", now 9: run `rlplus-bench tune` again")
    assert not tuning._in_use


def test_the_cache_has_a_file_per_device_dtype_and_size(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUS_CACHE", "/cache")
    one = Kind("NVIDIA A100-SXM4/80GB", "bfloat16", 5, 7)
    assert cached_file(one) == Path("/cache/tuning-NVIDIA-A100-SXM4-80GB-bfloat16-5x7.json")
    others = [one._replace(**{name: 9}) if name in "VH" else one._replace(**{name: "x"}) for name in Kind._fields]
    assert len({cached_file(x) for x in (one, *others)}) == 5
    monkeypatch.setenv("RLPLUS_CACHE", "relative")
    assert cached_file(one) is None


# ---- the heads that they apply to


def launched(**options: Any) -> list[Any]:
    """The tile of our GEMM, or the block of the kernel after the vendor's, in a call on a head of (V, H)."""
    head, _ = sample(5, options.pop("V", V), dtype=options.pop("dtype", torch.float32), H=H)
    bias = head.pop("bias")
    if options.pop("bias", False):
        head["bias"] = bias
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name, key in (
            (kernels, "linear_exponentials", "tile"), (exponentials, "row_exponentials", "block"),
        ):  # fmt: skip
            original = getattr(module, name)
            note = lambda *a, original=original, key=key, **o: (seen.append(o[key]), original(*a, **o))  # noqa: E731
            patch.setattr(module, name, note)
        linear_logprob(**{k: x.to(DEVICE) for k, x in head.items()}, backend="triton", **options)
    return list(dict.fromkeys(seen))


def test_a_tuning_applies_to_heads_of_its_kind_and_only_on_request(kind: Kind, tmp_path: Path) -> None:
    write(tmp_path / "tuning", record_of(kind, DEFAULT._replace(forward=TILES[0][0], programs=PROGRAMS[1]), []))
    assert launched() == [DEFAULT.statistics]
    use_tuning(tmp_path / "tuning")
    assert launched() == [TILES[0][0]]
    assert launched(V=71) == launched(dtype=torch.float16) == [DEFAULT.statistics]
    other_code = ({"bias": True}, {"logit_softcap": 9.0}, {"temperature": torch.ones(5, device=DEVICE)})
    assert [launched(**options) for options in other_code] == [[DEFAULT.statistics]] * 3
    assert launched(temperature=0.5, logit_scale=2.0) == [TILES[0][0]]


def test_using_ends(kind: Kind) -> None:
    with tuning.using(kind, TILED):
        with pytest.raises(KeyError), tuning.using(kind, DEFAULT):
            raise KeyError
        assert tuning._in_use == {kind: TILED}
    assert not tuning._in_use


# ---- the effect of each part


ONE_BY_ONE = [
    *(DEFAULT._replace(statistics=block) for block in STATISTICS[1:]),
    *(DEFAULT._replace(gradient=block) for block in GRADIENT[1:]),
    DEFAULT._replace(programs=PROGRAMS[1]),
    DEFAULT._replace(rows=Rows(2, 10**6)),
]


@pytest.mark.parametrize("tiling", ONE_BY_ONE, ids=str)
@pytest.mark.parametrize("memory", ["fast", "least"])
def test_every_part_of_a_tiling_is_right(memory: str, tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory="least" the row is in several blocks, whose tiling is the head's."""
    head, constants = sample(3, 9000, dtype=torch.float32, H=8)
    seen = set()
    for name in ("row_exponentials", "row_gradient"):
        original = getattr(exponentials, name)
        note = lambda *a, name=name, original=original, **o: (seen.add((name, o["block"])), original(*a, **o))  # noqa: E731
        monkeypatch.setattr(exponentials, name, note)
    monkeypatch.setattr(tuning, "tiling_of", lambda head: tiling if len(head.weight) == 9000 else DEFAULT)
    got = on_device(DEVICE, head, constants, EVERYTHING, max_scratch_mb=0.05, memory=memory)
    check_precision(got, head, constants, EVERYTHING)
    assert seen == {("row_exponentials", tiling.statistics), ("row_gradient", tiling.gradient)}


def test_blocks_of_the_gradient_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sample(2, 9000, dtype=torch.float32, H=8)
    results = []
    for block in GRADIENT:
        monkeypatch.setattr(tuning, "tiling_of", lambda head, block=block: DEFAULT._replace(gradient=block))
        results.append(tensors(on_device(DEVICE, *case, EVERYTHING)))
    assert all(torch.equal(x[name], results[0][name]) for x in results for name in x)


def test_timed_rows_are_for_their_scratch_and_never_more_than_the_tokens() -> None:
    def rows(n: int, scratch: float, tiling: Tiling) -> int:
        hidden, weight = torch.empty(n, 64, device="meta"), torch.empty(4000, 64, device="meta")
        head = Head(hidden, weight, None, torch.empty(n, dtype=torch.int64, device="meta"), 1.0)
        return chunk_rows(head, Way(None, dlogits=torch.float32), scratch, tiling=tiling)

    timed = DEFAULT._replace(rows=Rows(100, 4_000_000))
    assert rows(1000, 4e6, timed) == 100
    assert rows(70, 4e6, timed) == 70
    assert rows(1000, 5e6, timed) == rows(1000, 5e6, DEFAULT)
    assert rows(1000, 4e6, DEFAULT) != 100


def test_without_a_tuning_nothing_changes(kind: Kind) -> None:
    """Bit for bit, also after one was in use."""
    case = sample(17, V, dtype=torch.float32, H=H)
    del case[0]["bias"]
    first = tensors(run(*case, EVERYTHING, backend="triton"))
    with tuning.using(kind, DEFAULT._replace(loss=TILES[0][1])):
        other = tensors(run(*case, EVERYTHING, backend="triton"))
    again = tensors(run(*case, EVERYTHING, backend="triton"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# ---- a run


def test_a_resumed_run_keeps_the_tuning_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RLPLUS_CACHE", str(tmp_path / "cache"))
    config = run_config(tmp_path, train={"backend": "triton", "tuning": "auto"})
    kind = tuning.kind_of(torch.device(DEVICE), torch.float32, 258, 32)
    first, later = (Tiling(programs=n) for n in PROGRAMS[1:])
    path = cached_file(kind)
    assert path is not None
    write(path, record_of(kind, first, []))
    with open_run(config) as began:
        assert tuning._in_use == {kind: first}
        assert began.policy.nonfinite() == ""
        began.progress.step = 1
        began.save_checkpoint()
    assert not tuning._in_use
    assert f"tuning: {path}\n" in capsys.readouterr().err.replace("\n ", " ")
    write(path, record_of(kind, later, []))
    with open_run(config, resume="newest"):
        assert tuning._in_use == {kind: first}
    assert "tuning: as at the start of the run\n" in capsys.readouterr().err


def test_a_run_resumed_on_another_gpu_or_version_has_no_tuning(kind: Kind) -> None:
    record = record_of(kind, TILED, [])
    assert resume(record, kind) == (record, TILED, "as at the start of the run")
    kept, tiling, note = resume(record, kind._replace(device="NVIDIA Other"))
    assert (kept, tiling) == (record, None)
    assert note.startswith("want a tuning for NVIDIA Other, ")
    with mock.patch.object(tuning, "versions", return_value=record["versions"] | {"torch": "9"}):
        kept, tiling, note = resume(record, kind)
    assert (kept, tiling) == (record, None)
    assert note.startswith("the tuning in this run's checkpoint is not used, it was made with torch ")
    assert resume(None, kind) == (None, None, "")
