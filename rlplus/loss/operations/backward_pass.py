"""Which backward pass a call has: exact, or sampled by random numbers that come with the head."""

import os
from typing import Literal, NamedTuple, NoReturn, get_args

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


class BackwardPass(NamedTuple):
    """Options of a call, see `linear_policy_loss`."""

    backward: str
    threshold: float
    seed: int | None

    def sampled(self) -> bool:
        """Whether it is sampled, see `backward_of`. ValueError for wrong options, whichever it is."""
        way = backward_of(self.backward)
        threshold = self.threshold
        seed = self.seed
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < 1:
            raise ValueError(f"want threshold in (0, 1); got {threshold!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | None) or not -(2**63) <= (seed or 0) < 2**64:
            raise ValueError(f"want seed an int of 64 bits or None; got {seed!r}")
        return way == "sampled"

    def refuse(self, what: str) -> NoReturn:
        """ValueError for a sampled backward pass together with `what`; it says where the choice came from."""
        came = "'sampled', from RLPLUS_BACKWARD" if self.backward == "auto" else "'sampled'"
        raise ValueError(f"want backward 'exact' with {what}; got {came}")

    def with_draws(self, head: Head, backend: str, differentiated: bool = True) -> Head:
        """The head, with random numbers if it is differentiated by a sampled backward pass.

        Without a seed they are those of torch's generator.
        """
        if not (self.sampled() and differentiated):
            return head
        device = head.hidden.device
        if backend == "reference":
            self.refuse("backend 'reference'")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.refuse("a CUDA graph that is captured, since the host waits for the number of elements")
        generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        uniform = torch.rand(len(head.target), generator=generator, device=device, dtype=torch.float32)
        return head._replace(uniform=uniform, threshold=float(self.threshold))
