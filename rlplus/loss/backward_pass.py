"""Which backward pass a call has: exact, or sampled by random numbers that come with the head."""

import os
from typing import Literal, get_args

import torch

from rlplus.loss.head import Head

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


def with_draws(head: Head, backward: str, threshold: float, seed: int | None, backend: str) -> Head:
    """The head with random numbers for its backward pass, if that is sampled.

    seed: an int; None: the numbers are the next of torch's generator of the device.
    """
    if backward_of(backward) == "exact":
        return head
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < 1:
        raise ValueError(f"want threshold in (0, 1); got {threshold!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | None):
        raise ValueError(f"want seed an int or None; got {seed!r}")
    if backend == "reference" or head.group:
        which = "a split head" if head.group else "backend 'reference'"
        raise ValueError(f"want backward 'exact' with {which}; got 'sampled'")
    device = head.hidden.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(len(head.target), generator=generator, device=device, dtype=torch.float32)
    return head._replace(uniform=uniform, threshold=float(threshold))
