"""The self-check as a child process of test_verdicts.py: small, in the interpreter, right or with a planted mistake.

python selfcheck_child.py right|far
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from quick_interpreter import make_quick

from rlplus.kernels import exponentials
from rlplus.loss import selfcheck

make_quick()
kernel = exponentials._gradient_kernel


class Far:
    """Launches a kernel that stores outside every memory of the process: the rows lie too far apart."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> None:
            kernel[grid](*arguments[:5], (2**45, arguments[5][1]), *arguments[6:], **options)

        return launch


if sys.argv[1] == "far":
    exponentials._gradient_kernel = Far()
selfcheck.check = partial(selfcheck.check, cases=[selfcheck.Case(14, 70, 0.005, bias=True)], H=8)
print(json.dumps(selfcheck.judge("cpu", "float32")._asdict()))
