"""What each suite measures, the most important first: a suite that runs out of time leaves out its end."""

from .cases import Case

OURS = ("reference", "torch", "cpp", "triton")
ENTROPY = ("torch entropy", "cpp entropy", "triton entropy")
PEERS = (
    "naive torch", "torch linear CE", "torch linear CE tuned", "torch linear CE none", "verl torch", "TRL",
    "Liger linear CE", "Liger scaled CE", "QuACK", "Liger GRPO", "Liger GRPO tuned", "CCE", "CCE none",
)  # fmt: skip
FORWARD = (
    "fp32 logits forward", "naive torch forward", "reference forward", "torch forward", "cpp forward", "triton forward",
    "torch linear CE none forward", "verl torch forward", "TRL forward", "CCE none forward",
)  # fmt: skip


def sweep(what: str, base: dict[str, int], values: tuple[int, ...], dtype: str, method: str, **fields: int) -> list[Case]:
    """Cases that differ in one size, named after it."""
    cases = [base | {what: value} for value in values]
    return [
        Case(f"sweep {what}", **sizes, dtype=dtype, methods=(method,), repeats=3, accuracy=False, **fields)  # type: ignore[arg-type]
        for sizes in cases
    ]


def cpu() -> list[Case]:
    """At most ten minutes on two cores. `bars` has the shape and the rows of the project's bars."""
    bars = {"N": 2048, "H": 896, "V": 32_000}
    peers = bars | {"N": 1024}
    cases = [
        Case("bars", **bars, dtype=dtype, methods=("cpp",), sparse=("cpp",), shares=(1.0, 0.25), external=0.5,
             scattered=True, seconds=seconds, accuracy=False)
        for dtype, seconds in (("float32", 110), ("bfloat16", 60))
    ]  # fmt: skip
    cases += [
        Case("main", **peers, dtype=dtype, repeats=repeats, seconds=seconds,
             methods=("cpp", "cpp least", "cpp entropy", "cpp filter", "torch", "triton", "reference", *PEERS))
        for dtype, repeats, seconds in (("bfloat16", 3, 110), ("float32", 3, 150))
    ]  # fmt: skip
    cases += [Case("forward", **peers, dtype="bfloat16", methods=FORWARD, forward=True, repeats=3, seconds=40)]
    base = {"N": 512, "H": 448, "V": 16_000}
    for what, values in {"N": (256, 512, 1024, 2048), "V": (8000, 16_000, 32_000), "H": (224, 448, 896)}.items():
        cases += sweep(what, base, values, "bfloat16", "cpp 40 MB", seconds=8)
    return cases


def gpu() -> list[Case]:
    """At most nine minutes on one H200."""
    main = {"N": 16_384, "H": 3584, "V": 151_936}  # Qwen2.5-7B
    ours = ("triton", "triton 320 MB", "triton 160 MB", "triton least", "triton entropy", "triton filter", "torch")
    few = ("triton", "torch", "naive torch", "Liger GRPO tuned", "CCE")
    cases = [
        Case("main", **main, dtype="bfloat16", methods=(*ours, *PEERS), sparse=few, shares=(1.0, 0.5, 0.25),
             seconds=200),
        Case("forward", **main, dtype="bfloat16", methods=FORWARD, forward=True, seconds=60),
    ]  # fmt: skip
    base = {"N": 4096, "H": 2048, "V": 64_000}
    sizes = {"N": (2048, 4096, 8192, 16_384, 32_768), "V": (16_000, 32_000, 64_000, 128_000, 256_000),
             "H": (1024, 2048, 4096, 8192)}  # fmt: skip
    for what, values in sizes.items():
        cases += sweep(what, base, values, "bfloat16", "triton", seconds=8)
    small = ("triton", "torch", "reference", *PEERS)
    cases += [
        Case("small", N=4096, H=896, V=151_936, dtype="bfloat16", methods=small, seconds=60),  # Qwen2.5-0.5B
        Case("small", N=4096, H=896, V=32_000, dtype="float32", methods=small[:4], seconds=20),
        Case("small", N=4096, H=896, V=32_000, dtype="float16", methods=small[:4], seconds=20),
        # Last and by itself: it has no mask at the vocabulary's end, and an illegal access ends the process's CUDA.
        Case("unaligned", **main, dtype="bfloat16", methods=("triton", "verl triton"), seconds=30),
    ]
    return cases


def quick() -> list[Case]:
    """At most a minute on a CPU."""
    sizes = {"N": 128, "H": 128, "V": 4000}
    methods = ("cpp", "cpp least", "torch", "triton", "reference", *PEERS[:-4])
    cases = [
        Case("main", **sizes, dtype=dtype, methods=methods, sparse=("cpp", "torch"), shares=(1.0, 0.5), repeats=5,
             seconds=8, memory=False)
        for dtype in ("bfloat16", "float32")
    ]  # fmt: skip
    cases += [Case("forward", **sizes, dtype="bfloat16", methods=FORWARD[:-1], forward=True, seconds=4, memory=False)]
    base = {"N": 256, "H": 128, "V": 4000}
    return cases + sweep("N", base, (256, 1024), "bfloat16", "cpp 40 MB", seconds=8)


SUITES = {"cpu": (cpu, 570.0), "gpu": (gpu, 510.0), "quick": (quick, 50.0)}  # its cases, its seconds
