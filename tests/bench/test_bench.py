"""The benchmark program: its results' form, its numbers' sanity, its errors, and the manual's tables."""

import json
import platform
import sys
from dataclasses import replace
from importlib import import_module
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from sweeps import SWEPT, swept
from trainer_runs import environment

from rlplus.bench import measure, output
from rlplus.bench.__main__ import main
from rlplus.bench.cases import Case, Head, Inputs
from rlplus.bench.measure import Measurement, memory_of_a_process, run
from rlplus.bench.peers import METHODS, method, submodule
from rlplus.bench.suites import SUITES, cpu, full, quick, unlimited

ROOT = Path(__file__).parents[2]
SMALL = Case(
    "main", N=128, H=64, V=300, dtype="float32", methods=("torch", "naive torch"), repeats=2, memory=False, seconds=inf
)
ALWAYS = ("reference", "torch", "naive torch")  # methods that run everywhere


def measured(case: Case) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    run(case, "cpu", inf, results.append)
    return json.loads(json.dumps(results[-1]))


# ---- inputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_look_like_rl_data(dtype: str) -> None:
    head = Head(replace(SMALL, N=4096, H=256, V=2000, dtype=dtype), "cpu")
    p = head.logprob.exp()
    sampled, demonstrated = p[~head.external], p[head.external]
    assert head.external.float().mean() == 1 / 8
    assert 0.6 < (sampled > 0.9).double().mean() < 0.9  # most tokens are confident
    assert demonstrated.median() < 0.1
    logits = torch.cat([z for (z,) in head.exact_logits()])
    assert 1.5 < logits.std() < 4


def test_logprobs_and_gradients_are_those_of_autograd() -> None:
    inputs = Inputs(Head(SMALL, "cpu"), 0.5)
    hidden, weight = (t.detach().double().requires_grad_() for t in (inputs.hidden, inputs.weight))
    logprob = (hidden @ weight.T).log_softmax(1)[torch.arange(SMALL.N), inputs.target]
    torch.testing.assert_close(inputs.head.logprob, logprob.detach(), rtol=1e-12, atol=1e-12)
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, inputs.ce_target)
    for got, want in zip(inputs.gradients("cross-entropy"), torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_the_stated_share_of_rows_has_a_gradient(share: float, scattered: bool) -> None:
    inputs = Inputs(Head(replace(SMALL, N=8192, H=8, V=50, scattered=scattered), "cpu"), share)
    METHODS["naive torch"].prepare(inputs)()
    assert inputs.hidden.grad is not None
    rows = inputs.hidden.grad.abs().amax(1) > 0
    assert inputs.active.double().mean() == share
    assert not (rows & ~inputs.active).any()


# ---- results


def test_accuracy_of_fp32_is_that_of_fp32_and_of_bf16_that_of_bf16() -> None:
    for dtype, low, high in (("float32", 0, 1e-4), ("bfloat16", 1e-4, 0.3)):
        case = measured(replace(SMALL, dtype=dtype, methods=ALWAYS, repeats=1))
        rows = {row["method"]: row for row in case["rows"]}
        for row in (rows[name] for name in ALWAYS):
            assert low <= row["dhidden_error"] < high
            assert low <= row["dweight_error"] < high
        assert rows["torch"]["logprob_error"] < 1e-4
        assert low <= rows["naive torch"]["logprob_error"] < high


def test_every_available_method_computes_its_loss() -> None:
    """Whatever is installed here: the gradients belong to the loss that the method says it has."""
    methods = tuple(m for m in METHODS if METHODS[m].kind not in ("bare", "forward"))
    case = measured(replace(SMALL, N=16, H=16, V=50, repeats=1, methods=methods))
    for row in case["rows"]:
        if row["status"] == "ok" and METHODS[row["method"]].kind not in ("bare", "other"):
            assert row["dweight_error"] < (5e-3 if "sampled" in row["method"] else 1e-4), row
        else:
            assert row["status"].startswith(("ok", "needs", "not installed")), row


def test_a_case_has_the_form_that_readers_expect() -> None:
    case = measured(replace(SMALL, sparse=("torch",), shares=(1.0, 0.5)))
    assert {"name", "N", "H", "V", "dtype", "forward", "external", "scattered", "rounds", "rows"} <= case.keys()
    assert [row["method"] for row in case["rows"]] == ["bare-3u", "torch", "naive torch", "torch"]
    assert [row["rho"] for row in case["rows"]] == [1, 1, 1, 0.5]
    for row in case["rows"]:
        assert row["status"] == "ok"
        for value in (row["ms"], row["ratio"]):
            assert 0 < value["least"] <= value["median"] <= value["greatest"]
    assert case["rounds"] == 2
    assert case["rows"][0]["ratio"]["median"] == 1


def test_a_forward_case_counts_in_one_gemm_and_has_no_gradients() -> None:
    case = measured(replace(SMALL, methods=("fp32 logits forward", "torch forward"), forward=True))
    assert case["rows"][0]["method"] == "bare-1u"
    for row in case["rows"][1:]:
        assert row["logprob_error"] < 1e-4
        assert "dweight_error" not in row


@pytest.mark.slow
def test_memory_of_full_logits_is_at_least_the_logits() -> None:
    case = replace(SMALL, N=2048, H=32, V=8000)
    full = memory_of_a_process(case, METHODS["naive torch"])
    assert 2 * 4e-6 * case.N * case.V < full < 10 * 4e-6 * case.N * case.V
    assert memory_of_a_process(case, METHODS["torch 40 MB"]) < full / 2


@pytest.mark.gpu
def test_memory_and_time_on_cuda() -> None:
    case = replace(SMALL, N=2048, V=8000, memory=True, methods=("triton", "torch 40 MB", "naive torch"))
    results: list[dict[str, Any]] = []
    run(case, "cuda", inf, results.append)
    rows = {row["method"]: row for row in results[-1]["rows"]}
    for name in case.methods:
        assert rows[name]["status"] == "ok"
        assert rows[name]["ms"]["median"] > 0
        assert rows[name]["dweight_error"] < 1e-2  # fp32 may be multiplied as TF32
    logits = 4e-6 * case.N * case.V
    assert 0 < rows["torch 40 MB"]["extra_mb"] < rows["naive torch"]["extra_mb"] / 2
    assert 2 * logits < rows["naive torch"]["extra_mb"] < 10 * logits


# ---- what cannot be measured


def test_a_method_that_cannot_run_is_a_row_that_says_why() -> None:
    @method("absent", "policy", "", package="no-such-package")
    def absent(_: Inputs) -> Any:
        import_module("no_such_module")

    @method("broken", "policy", "")
    def broken(_: Inputs) -> Any:
        return lambda: 1 / 0

    @method("later", "policy", "")
    def later(_: Inputs) -> Any:
        calls = iter(range(2))

        def step() -> None:
            if next(calls, None) is None:
                raise ValueError("the third call")

        return step

    try:
        case = measured(replace(SMALL, methods=("absent", "broken", "later", "QuACK", "torch")))
    finally:
        del METHODS["absent"], METHODS["broken"], METHODS["later"]
    status = {row["method"]: row["status"] for row in case["rows"]}
    assert status["later"] == "failed: ValueError: the third call"
    assert status["absent"] == "not installed: no-such-package; bench/README.md says how"
    assert status["broken"] == "failed: ZeroDivisionError: division by zero"
    assert status["torch"] == "ok"
    if not torch.cuda.is_available():
        assert status["QuACK"] == "needs CUDA"


def test_without_the_bare_gemms_there_are_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(METHODS["bare-3u"], prepare=lambda _: lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(METHODS, "bare-3u", broken)
    assert measured(SMALL)["rows"][1]["status"] == "failed: the bare GEMMs did"


def test_what_does_not_fit_into_the_time_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(measure, "time", clock)

    def takes(seconds: float) -> Any:
        return lambda _: lambda: now.append(now.pop() + seconds)

    monkeypatch.setitem(METHODS, "bare-3u", replace(METHODS["bare-3u"], prepare=takes(0.1)))
    method("slow", "policy", "")(takes(2))
    try:
        measurement = Measurement(replace(SMALL, methods=("torch", "slow"), seconds=4), "cpu", inf)
        measurement.time()
        late = Measurement(replace(SMALL, seconds=0), "cpu", inf)
    finally:
        del METHODS["slow"]
    status = {row["method"]: row["status"] for row in measurement.rows}
    assert status["torch"] == "ok"
    assert status["slow"] == "left out: a call takes 2.0 s, too long for the time left"
    assert {row["status"] for row in late.rows} == {"left out: no time left for its first call"}


@pytest.mark.parametrize(("cost", "calls"), [(1e-4, 50), (0.03, 4), (0.2, 1), (2.0, 0)])
def test_a_gpu_settles_before_a_call_is_timed(cost: float, calls: int) -> None:
    inputs, made = Inputs(Head(SMALL, "cpu"), 1.0), []
    measure.settle(METHODS["torch"], inputs, lambda: made.append(torch.is_grad_enabled()), cost)
    assert made == calls * [True]


def test_a_package_is_read_without_what_its_parents_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer_of_test/inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer_of_test/__init__.py").write_text("import no_such_module")
    (inner / "__init__.py").write_text("import no_such_module")
    (inner / "leaf.py").write_text("from other_of_test.utils import helper\nvalue = helper()")
    monkeypatch.syspath_prepend(tmp_path)
    parents = ("outer_of_test", "outer_of_test.inner")
    needed = {"other_of_test": {}, "other_of_test__utils": {"helper": lambda: 3}}
    try:
        assert submodule("outer_of_test.inner.leaf", *parents, **needed).value == 3
    finally:
        for name in [name for name in sys.modules if "_of_test" in name]:
            del sys.modules[name]


# ---- the program


def test_the_program_writes_as_it_goes_and_says_that_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUITES, "quick", (lambda: unlimited(quick()), inf))
    monkeypatch.setattr("rlplus.bench.session.keep_memory", lambda _: None)  # it would change this process's malloc
    own, cases = output.write_text, []
    monkeypatch.setattr(
        output, "write_text", lambda path, text: (cases.append(len(json.loads(text)["cases"])), own(path, text))
    )
    threads = torch.get_num_threads()
    main(["--suite", "quick", "--output", str(tmp_path / "new"), "--repeats", "1", "--only", "torch", "QuACK"])
    torch.set_num_threads(threads)
    result = json.loads((tmp_path / "new/quick.json").read_text())
    assert result["complete"]
    assert cases == sorted(cases)
    assert set(cases) == {0, 1, 2}
    assert {"suite", "device", "clock", "threads", "hardware", "versions"} <= result.keys()
    assert result["versions"]["torch"] == torch.__version__
    assert [case["dtype"] for case in result["cases"]] == ["bfloat16", "float32"]
    assert {row["status"] for case in result["cases"] for row in case["rows"]} == {"ok", "needs CUDA"}
    assert "×bare" in capsys.readouterr().out
    assert (tmp_path / "new/quick.png").exists()


FAULTS = """
import torch
from rlplus.bench.cases import Case, Head, Inputs
from rlplus.bench.measure import Measurement, keep_memory
torch.set_num_threads(1)
keep_memory(4 * 10**8)
case = Case("main", N=512, H=32, V=20_000, dtype="float32", methods=("torch", "naive torch"), repeats=3)
measurement = Measurement(case, "cpu", float("inf"))
measurement.time()
print(*(row["page_faults"] for row in measurement.rows))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_no_timed_call_pays_for_fresh_pages() -> None:
    """One buffer of logits, 41 MB, would be 10,000 pages."""
    done = processes.run([sys.executable, "-c", FAULTS], env=environment())
    assert done.returncode == 0, done.stderr
    faults = [float(count) for count in done.stdout.split()]
    assert len(faults) == 3
    assert max(faults) < 100


def test_it_runs_from_the_source_tree() -> None:
    done = processes.run([sys.executable, "-m", "bench", "--list"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in METHODS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "want --suite, --list or --model"),
        (["--suite", "all"], "invalid choice: 'all'"),
        (["--suite", "cpu", "--threads", "0"], "want a number >= 1; got 0"),
        (["--suite", "cpu", "--repeats", "-1"], "want a number >= 1; got -1"),
        (["--suite", "cpu", "--only", "tritn"], "no method 'tritn'; nearest: triton"),
        (["--suite", "cpu", "--output", __file__], "want a folder; got the file"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_suite_needs_one(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--suite", "gpu"])
    assert stop.value.code == 2
    assert "needs CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("suite", SUITES)
def test_suites_name_methods_that_exist_and_fit_into_their_time(suite: str) -> None:
    make, seconds = SUITES[suite]
    cases = make()
    assert sum(case.seconds for case in cases) <= seconds
    for case in cases:
        assert {METHODS[name].kind == "forward" for name in case.methods} == {case.forward}
        assert set(case.sparse) <= set(case.methods)


def test_the_full_suite_is_the_cpu_suite_without_limits() -> None:
    assert SUITES["full"][1] == inf
    assert {case.seconds for case in full()} == {inf}
    assert [replace(case, seconds=0) for case in full()] == [replace(case, seconds=0) for case in cpu()]
    assert all(case.repeats == 20 for case in full())


def test_a_sweep_measures_its_base_once() -> None:
    shapes = [(case.dtype, case.N, case.H, case.V) for case in full() if case.name == "sweep"]
    assert len(shapes) == len(set(shapes)) == 2 * 7


def test_the_committed_results_are_complete() -> None:
    results = output.load(ROOT / "bench/results")
    assert all(result["complete"] for result in results.values())
    rows = [row for result in results.values() for case in result["cases"] for row in case["rows"]]
    assert not [row for row in rows for value in row.values() if str(value).startswith("left out")]


def test_the_gpu_table_takes_methods_from_all_cases_of_the_main_one() -> None:
    """verl's kernel is measured apart. A method without a number has the reason in its place."""
    result = output.load(ROOT / "bench/results")["gpu"]
    main, apart = result["cases"][0], result["cases"][-1]
    for row in main["rows"]:
        row |= {"status": "failed: X: y"} if row["method"] == "TRL" else {}
    table = output.gpu_table(result)
    for case, name, shown in ((apart, "verl triton", "verl triton"), (main, "triton", "rlplus, `triton`")):
        row = output.row_of(case, name)
        assert row is not None
        assert f"| {shown} | RL-PLUS | {output.ratio(row)} |" in table
    assert "| TRL | RL-PLUS | failed: X |" in table


def test_the_manual_has_every_size_that_was_measured_on_a_gpu() -> None:
    result = output.load(ROOT / "bench/results")["gpu"]
    table = output.other_sizes_table(result)
    shapes = {(c["dtype"], c["N"], c["H"], c["V"]) for c in result["cases"] if c["name"] in ("sweep", "small")}
    assert len(table.splitlines()) == 4 + len(shapes)
    (case,) = (c for c in result["cases"] if (c["dtype"], c["V"]) == ("float32", 32000))
    medians = {row["method"]: row["ratio"]["median"] for row in case["rows"] if row.get("ratio")}
    assert f"| float32 | 4096 | 896 | 32000 | {medians['triton']:.2f} (" in table
    assert f" | naive torch {medians['naive torch']:.2f} |" in table


def test_the_main_table_holds_every_method_with_its_number_or_its_reason() -> None:
    case = measured(replace(SMALL, methods=("torch", "naive torch", "QuACK"), repeats=1))
    result = {"suite": "cpu", "device": "x", "hardware": {}, "threads": 1, "versions": {"torch": "2"}, "cases": [case]}
    table = output.manual_part({"cpu-1": result})
    assert "| `torch` |" in table
    assert f"{case['rows'][2]['ratio']['median']:.2f}" in table
    assert case["rows"][3]["status"] in table
    assert "GPU: not measured yet." in table
    assert "no bf16 instructions" not in table


def test_the_manual_shows_every_shape_of_the_sweep_and_its_range() -> None:
    text = output.manual_part({"cpu-1": swept(SWEPT)})
    assert "1.12 to 1.88 × the bare GEMMs in bfloat16." in text
    for shape, value in SWEPT.items():
        assert f"| bfloat16 | {' | '.join(map(str, shape))} | {value:.2f}" in text
    assert "at most 0 for the bare GEMMs, 7 for any method (`cpp 40 MB`)" in text
    assert "has no bf16 instructions" in text
