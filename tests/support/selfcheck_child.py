"""The self-check as a child process of test_verdicts.py: small, in the interpreter, right or with a planted mistake.

python selfcheck_child.py right|far
"""

import json
import sys
from functools import partial
from typing import Any

from rlplus.kernels import linear_logprob as kernels
from rlplus.loss import selfcheck

row_gradient = kernels.row_gradient


def far_away(dlogits: Any, slot: Any, *rest: Any, **options: Any) -> None:
    """Stores outside every memory of the process."""
    row_gradient(dlogits, slot + 2**40, *rest, **options)


if sys.argv[1] == "far":
    kernels.row_gradient = far_away
selfcheck.check = partial(selfcheck.check, cases=[selfcheck.Case("fast", 14, 70, 0.005, bias=True)], H=8)
print(json.dumps(selfcheck.judge("cpu", "float32")._asdict()))
