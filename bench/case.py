"""One measured case: its shape, its methods and its limits. Without torch, for the command's arguments and --help."""

from dataclasses import dataclass

NAMES = ("float32", "bfloat16", "float16")  # dtypes
GROUP = 8  # sequences: seven sampled, one demonstrated


@dataclass(frozen=True)
class Case:
    """One set of tensors, and the methods measured on it in turn.

    - `forward`: logprobs only, without gradients
    - `shares`: share of rows with a gradient; the first is for all methods, the others for those named in `sparse`
    - `external`: share of demonstrated rows
    - `scattered`: rows without a gradient have weight 0 and lie anywhere; else they are whole groups of zero advantage
    - `seconds`: what the case may take; measuring stops after the round in which it is spent
    - `memory`, `accuracy`: whether these are measured, once per method, at the first share
    - `profiled`: methods of which one call is timed by kernel
    - `rows`: a safetensors file of a real model's rows, hidden (n, H), weight (V, H), target (n,) int64, of which the
      case has N, the first ones again if there are fewer; without a file they are made up
    """

    name: str
    N: int
    H: int
    V: int
    dtype: str
    methods: tuple[str, ...]
    forward: bool = False
    sparse: tuple[str, ...] = ()
    shares: tuple[float, ...] = (1.0,)
    external: float = 1 / GROUP
    scattered: bool = False
    repeats: int = 20
    seconds: float = 60.0
    memory: bool = True
    accuracy: bool = True
    profiled: tuple[str, ...] = ()
    rows: str | None = None
