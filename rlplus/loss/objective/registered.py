"""User-defined token losses: internal surrogates that an `Objective` can name like the built-in ones."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlplus.common.lazy import import_function
from rlplus.loss.objective.surrogates import INTERNAL, Internal

if TYPE_CHECKING:
    from torch import Tensor

    from rlplus.loss.objective.objective import Objective
    from rlplus.loss.objective.surrogates import Terms
    from rlplus.loss.objective.tokens import TokenConstants

    TokenLossFunction = Callable[[Tensor, TokenConstants], tuple[Tensor, Tensor]]


def register_token_loss(name: str, function: "TokenLossFunction", *, check_slope: bool = True) -> None:
    """Make `function` the internal surrogate of that name: `Objective(internal=name)`.

    function: logprob (N,) and a `TokenConstants` -> loss (N,), slope (N,): what sampled tokens of weight 1 add to the
    loss, and its derivative with respect to logprob. It is called without autograd, in fp32 or fp64, on all tokens;
    tokens of weight 0, of advantage 0 and demonstrated ones are left out afterwards. old_logprob is always given (by
    default it is logprob); the other constants may be None.
    check_slope: compare the slope with finite differences now, on 64 random tokens in fp64. False for a loss that holds
    a factor constant, as "cispo" does.

    Backends: reference, torch and cpp. `Objective(internal="module:function")` registers a function automatically, with
    the check; a run's configuration can name it this way.
    Raises ValueError for a name that is taken and for a slope that is not the derivative.
    """
    if name in INTERNAL:
        raise ValueError(f"want a new name for a token loss; got {name!r}")
    if check_slope:
        _check_slope(name, function)

    def terms(logprob: "Tensor", c: "TokenConstants", o: "Objective") -> "Terms":
        loss, slope = function(logprob, c._replace(old_logprob=logprob) if c.old_logprob is None else c)
        return loss, slope, False, False

    INTERNAL[name] = Internal(terms)


def find_token_loss(name: object) -> None:
    """Import and register "module:function" unless it is registered; ValueError if it does not exist."""
    if not isinstance(name, str) or name in INTERNAL or name.count(":") != 1:
        return
    try:
        function = import_function(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"internal surrogate {name!r}: want module:function; {error}") from error
    register_token_loss(name, function)


def _check_slope(name: str, function: "TokenLossFunction") -> None:
    import torch

    from rlplus.loss.objective.tokens import TokenConstants

    n = 64
    step = 1e-6
    generator = torch.Generator().manual_seed(0)
    logprob, old, behavior, reference, engine = -0.05 - 4 * torch.rand(5, n, generator=generator, dtype=torch.float64)
    advantage = torch.linspace(-2, 2, n, dtype=torch.float64)
    one = torch.ones_like(logprob)
    external = torch.zeros(n, dtype=torch.bool)
    constants = TokenConstants(advantage, one, external, old, behavior, reference, engine, one)
    loss, slope = function(logprob, constants)
    for what, value in (("loss", loss), ("slope", slope)):
        if not (isinstance(value, torch.Tensor) and value.shape == (n,) and value.dtype == torch.float64):
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"token loss {name!r}: want {what} like logprob, {torch.float64} ({n},); got {got}")
    above, _ = function(logprob + step, constants)
    below, _ = function(logprob - step, constants)
    want = (above - below) / (2 * step)
    error = (slope - want).abs() - 1e-5 * (1 + want.abs())
    if not (error <= 0).all():
        worst = int(error.nan_to_num(nan=torch.inf).argmax())
        raise ValueError(
            f"token loss {name!r}: want slope the derivative of loss; got {slope[worst]:.6g} where finite differences "
            f"give {want[worst]:.6g}, at logprob {logprob[worst]:.4g} and advantage {advantage[worst]:.4g}. Pass "
            "check_slope=False for a loss that holds a factor constant"
        )
