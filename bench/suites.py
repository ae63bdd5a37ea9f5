"""The cases of each suite, the most important first: a suite that runs out of time omits the last ones."""

from dataclasses import replace
from math import inf
from typing import Any

from .case import Case

Sizes = dict[str, Any]

PEERS = (
    "naive torch", "naive torch compiled", "torch linear CE", "torch linear CE tuned", "torch linear CE none",
    "verl torch", "verl liger", "TRL", "Liger linear CE", "Liger scaled CE", "QuACK", "CCE", "CCE none",
)  # fmt: skip
GRPO = ("Liger GRPO", "Liger GRPO tuned")
# Their other options, which need a GPU.
OPTIONS = (
    "Liger linear CE 1x", "Liger linear CE 4x", "Liger linear CE 16x", "Liger none 1x", "Liger none 4x",
    "Liger none 16x", "Liger CuTe", "Liger GRPO TF32", "CCE tuned", "CCE none tuned",
)  # fmt: skip
BEST = (
    "naive torch", "naive torch compiled", "torch linear CE none", "TRL", "Liger linear CE 4x", "Liger none 4x",
    "Liger scaled CE", "QuACK", "Liger GRPO TF32", "CCE none tuned",
)  # fmt: skip
FORWARD = (
    "fp32 logits forward", "naive torch forward", "reference forward", "torch forward", "cpp forward", "triton forward",
    "torch linear CE none forward", "verl torch forward", "TRL forward", "Liger scaled CE forward",
    "Liger none forward", "CCE none forward",
)  # fmt: skip


def sweep(base: Sizes, values: Sizes, method: str, dtype: str = "bfloat16") -> list[Case]:
    """Cases that differ from `base` in one size each; the base once."""
    shared: Sizes = {"dtype": dtype, "methods": (method,), "seconds": 7, "accuracy": False}
    sizes = [base | {what: value} for what, several in values.items() for value in several]
    unique = [each for i, each in enumerate(sizes) if each not in sizes[:i]]
    return [Case("sweep", **each, **shared) for each in unique]


def cpu() -> list[Case]:
    """The suite `cpu`: at most ten minutes on two cores."""
    bars: Sizes = {"N": 1024, "H": 896, "V": 32_000}
    base: Sizes = {"N": 512, "H": 448, "V": 16_000}
    ours = (
        "cpp",
        "cpp into",
        "cpp entropy",
        "cpp kept",
        "cpp logprob",
        "cpp sampled",
        "cpp sampled logprob",
        "torch",
        "torch logprob",
        "triton",
        "reference",
    )
    cases = [
        Case("bars", **bars, dtype=dtype, methods=("cpp", "cpp logprob", "cpp logprob frozen"), sparse=("cpp",),
             shares=(1.0, 0.25), external=0.5, scattered=True, seconds=seconds, accuracy=False)
        for dtype, seconds in (("float32", 60), ("bfloat16", 90))
    ]  # fmt: skip
    cases += [
        Case("main", **base, dtype="bfloat16", methods=(*ours, *PEERS, *GRPO), seconds=200),
        Case("main", **base, dtype="float32", methods=(*ours, *PEERS, *GRPO), seconds=90, memory=False),
        Case("forward", **base, dtype="bfloat16", methods=FORWARD, forward=True, seconds=30, memory=False),
    ]
    values = {"N": (512, 1024, 2048), "V": (8000, 16_000, 32_000), "H": (224, 448, 896)}
    for dtype in ("bfloat16", "float32"):
        cases += sweep(base, values, "cpp 40 MB", dtype)
    return cases


def unlimited(cases: list[Case]) -> list[Case]:
    """All methods and rounds, however long they take."""
    return [replace(case, seconds=inf) for case in cases]


def full() -> list[Case]:
    """The cases of `cpu` without limits of time: the committed results."""
    return unlimited(cpu())


QWEN: Sizes = {"N": 16_384, "H": 3584, "V": 151_936}  # Qwen2.5-7B


def gpu() -> list[Case]:
    """The suite `gpu`: at most ten minutes on one H200."""
    options = ("320 MB", "160 MB", "into", "entropy", "kept", "logprob", "sampled", "sampled logprob")
    ours = ("triton", *(f"triton {option}" for option in options), "torch", "torch logprob", "cpp")
    return [
        Case("main", **QWEN, dtype="bfloat16", methods=(*ours, *PEERS, *OPTIONS), shares=(1.0, 0.5, 0.25),
             sparse=("triton", "naive torch", "CCE"), seconds=425, profiled=("bare-3u", "triton", "torch")),
        Case("forward", **QWEN, dtype="bfloat16", methods=FORWARD, forward=True, seconds=85,
             profiled=("bare-1u", "triton forward")),
        # By themselves: those of which 20 calls take long, and last one whose tiles do not fit V and are not masked:
        # an illegal access ends the process's CUDA.
        Case("apart", **QWEN, dtype="bfloat16", methods=("triton", "reference", *GRPO, "verl triton"), seconds=60),
    ]  # fmt: skip


def gpu_sizes() -> list[Case]:
    """The suite `gpu-sizes`: at most ten minutes on one H200."""
    shared: Sizes = {"dtype": "bfloat16", "seconds": 84}
    shared["methods"] = ("triton", "triton logprob", "triton sampled", "triton sampled logprob", "torch", *BEST)
    cases = [Case("small", **(QWEN | {"N": N}), **shared) for N in (2048, 4096, 8192)]
    cases += [Case("small", N=8192, H=4096, V=151_936, **shared)]  # Qwen3-8B
    cases += [Case("small", N=4096, H=896, V=151_936, **shared)]  # Qwen2.5-0.5B
    few: Sizes = {"N": 4096, "H": 896, "V": 32_000, "methods": ("triton", "torch", "reference", "naive torch")}
    cases += [Case("small", **few, dtype=dtype, seconds=20) for dtype in ("float32", "float16")]
    base: Sizes = {"N": 4096, "H": 2048, "V": 64_000}
    sizes = {"N": (2048, 4096, 8192, 16_384, 32_768), "V": (16_000, 32_000, 64_000, 128_000, 256_000),
             "H": (1024, 2048, 4096, 8192)}  # fmt: skip
    return cases + [replace(case, seconds=9) for case in sweep(base, sizes, "triton")]


def tiny(cases: list[Case]) -> list[Case]:
    """The same methods on tensors of a few numbers, in one round without a limit: tries the program on a CPU."""
    small = [
        replace(case, N=16, H=32, V=300, repeats=1, memory=False, seconds=inf, sparse=case.sparse[:2]) for case in cases
    ]
    return [case for i, case in enumerate(small) if case not in small[:i]]


def quick() -> list[Case]:
    """The suite `quick`: at most a minute on a CPU."""
    sizes: Sizes = {"N": 128, "H": 128, "V": 4000}
    methods = ("cpp", "torch", "triton", "reference", "naive torch", *PEERS[2:6], "TRL", "QuACK")
    cases = [
        Case("main", **sizes, dtype=dtype, methods=methods, sparse=("cpp", "torch"), shares=(1.0, 0.5),
             seconds=8, memory=False)
        for dtype in ("bfloat16", "float32")
    ]  # fmt: skip
    cases += [Case("forward", **sizes, dtype="bfloat16", methods=FORWARD[:-3], forward=True, seconds=4, memory=False)]
    base: Sizes = {"N": 256, "H": 128, "V": 4000}
    return cases + sweep(base, {"N": (256, 1024)}, "cpp 40 MB")


# Its cases, its seconds.
SUITES = {"cpu": (cpu, 570.0), "full": (full, inf), "gpu": (gpu, 570.0), "gpu-sizes": (gpu_sizes, 570.0)}
SUITES["quick"] = (quick, 50.0)


def on_cuda(suite: str, tiny: bool) -> bool:
    return suite in ("gpu", "gpu-sizes") and not tiny
