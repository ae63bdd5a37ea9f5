"""Which backward pass a call has: exact, or sampled by random numbers that come with the head."""

import os
from typing import Literal, NoReturn, get_args

import torch

from rlplus.loss.head.head import Head

Backward = Literal["auto", "exact", "sampled"]
THRESHOLD = 2.0**-12


def backward_of(name: str) -> str:
    """ "exact" or "sampled"; "auto" is what the environment variable RLPLUS_BACKWARD says, or "exact"."""
    if name not in get_args(Backward):
        raise ValueError(f"want backward one of {', '.join(get_args(Backward))}; got {name!r}")
    if name != "auto":
        return name
    chosen = os.environ.get("RLPLUS_BACKWARD", "")
    if chosen not in ("", *get_args(Backward)):
        raise ValueError(f"want RLPLUS_BACKWARD one of {', '.join(get_args(Backward))}; got {chosen!r}")
    return chosen if chosen not in ("", "auto") else "exact"


def refuse(backward: str, what: str) -> NoReturn:
    """ValueError for a sampled backward pass together with `what`; it says where the choice came from."""
    came = "'sampled', from RLPLUS_BACKWARD" if backward == "auto" else "'sampled'"
    raise ValueError(f"want backward 'exact' with {what}; got {came}")


def check_backward(backward: str, threshold: float, seed: int | None) -> str:
    """The kind of backward pass, see `backward_of`. ValueError for wrong options, whichever it is."""
    way = backward_of(backward)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < 1:
        raise ValueError(f"want threshold in (0, 1); got {threshold!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | None) or not -(2**63) <= (seed or 0) < 2**64:
        raise ValueError(f"want seed an int of 64 bits or None; got {seed!r}")
    return way


def with_draws(head: Head, backward: str, threshold: float, seed: int | None, backend: str) -> Head:
    """The head with random numbers for its backward pass; those of torch's generator of the device without a seed."""
    device = head.hidden.device
    if backend == "reference":
        refuse(backward, "backend 'reference'")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        refuse(backward, "a CUDA graph that is captured, since the host waits for the number of elements")
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(len(head.target), generator=generator, device=device, dtype=torch.float32)
    return head._replace(uniform=uniform, threshold=float(threshold))
