"""The additions of `additions` that concern the loss."""

from additions import Addition

SURROGATE = Addition(
    "a surrogate",
    "spo",
    {
        "rlplus/loss/objective/surrogates.py": (
            (
                "\n\nINTERNAL = {\n",
                '''

def _spo(logprob: Tensor, c: TokenConstants, o: Objective) -> Terms:
    """-A r + |A| / (2 clip_low) (r - 1)^2 (simple policy optimization, arXiv 2401.16025)."""
    A, r = c.advantage, log_ratio(logprob, c).exp()
    penalty = A.abs() / o.clip_low * (r - 1)
    return -A * r + penalty * (r - 1) / 2, -A * r + penalty * r, False, False


INTERNAL = {
    "spo": Internal(_spo, reads=("clip_low",)),
''',
            ),
        ),
        "kernels/policy_loss.py": (
            (
                "# External: -> g and its derivative.\n",
                """@triton.jit
def _spo(logprob, old, A, c):
    r = tl.exp(logprob - old)
    penalty = tl.abs(A) / c.clip_low * (r - 1.0)
    return -A * r + penalty * (r - 1.0) * 0.5, -A * r + penalty * r, A < A, A < A


# External: -> g and its derivative.
""",
            ),
            ("INTERNAL = {", 'INTERNAL = {"spo": _spo, '),
        ),
        "tests/support/closed_form.py": (
            (
                '    "reinforce": lambda',
                '    "spo": lambda t: -t.A * t.r + abs(t.A) / (2 * t.o.clip_low) * (t.r - 1) ** 2,\n'
                '    "reinforce": lambda',
            ),
        ),
    },
    "assert load('algorithm.objective.internal=spo').algorithm.resolve().objective.internal == 'spo'",
    (
        "tests/loss/test_objective.py::test_matches_the_closed_form_in_fp64",
        "tests/kernels/test_token_kernel.py::test_every_surrogate_has_a_kernel_and_a_closed_form",
        "tests/kernels/test_token_kernel.py::test_every_objective_matches_its_definition",
        "-k=spo-mis-plain or every_surrogate",
    ),
)

PRESET = Addition(
    "a preset",
    "gentle",
    {
        "rlplus/loss/objective/objective.py": (
            ('"dr-grpo", ', '"gentle", "dr-grpo", '),
            ('    "dr-grpo": _', '    "gentle": _rollouts("clip", clip_low=0.1),\n    "dr-grpo": _'),
        ),
        "rlplus/train/algorithm/presets.py": (
            ('    "dr-grpo": _', '    "gentle": _rollouts_only("gentle", "token"),\n    "dr-grpo": _'),
        ),
        "tests/algorithm/test_presets.py": (
            (
                '    "dr-grpo": (',
                '    "gentle": ({"internal": "clip", "clip_low": 0.1}, "token", True, "none"),\n    "dr-grpo": (',
            ),
        ),
    },
    """
import rlplus
algorithm = load("algorithm.preset=gentle").algorithm.resolve()
assert algorithm.objective == rlplus.Objective.preset("gentle") and algorithm.objective.clip_low == 0.1
""",
    ("tests/algorithm/test_presets.py", "-k=gentle"),
)

BACKEND = Addition(
    "a backend of the loss",
    "plain_blocks",
    {
        "rlplus/loss/backends/plain_blocks.py": '''"""The chunks of the torch backend under another name."""

from rlplus.loss.backends.chunked import logprob, logprob_backward, new_stored, policy_loss, scratch_per_logit

__all__ = ["logprob", "logprob_backward", "new_stored", "policy_loss", "scratch_per_logit"]
''',
        "rlplus/loss/backends/__init__.py": (
            ('    "torch": "chunked",\n', '    "torch": "chunked",\n    "plain": "plain_blocks",\n'),
        ),
        "rlplus/train/config/train_section.py": (
            ('Literal["auto", "reference", ', 'Literal["auto", "plain", "reference", '),
        ),
    },
    """
import sys, torch, rlplus
assert load("train.backend=plain").train.backend == "plain"
from rlplus.loss.backends import implementation
assert implementation("plain").scratch_per_logit(torch.float32, "cpu") == 8
torch.manual_seed(0)
inputs = torch.randn(5, 8), torch.randn(30, 8), torch.randint(30, (5,))
given = {"old_logprob": None, "advantage": torch.randn(5), "token_weight": torch.ones(5), "objective": "grpo"}
plain, want = (rlplus.linear_policy_loss(*inputs, **given, backend=name).loss for name in ("plain", "reference"))
torch.testing.assert_close(plain, want)
assert "rlplus.loss.backends.plain_blocks" in sys.modules
""",
)

INTEGRATION = Addition(
    "an integration",
    "kindling",
    {
        "rlplus/integrations/kindling.py": '''"""Kindling 1.0 with the losses of rlplus."""

import kindling
from torch import Tensor

from rlplus.integrations.interface import check_interface
from rlplus.loss import Objective, policy_loss


def loss(logprob: Tensor, advantage: Tensor) -> Tensor:
    """The loss of "grpo" in the place of Kindling's."""
    weight = advantage.new_full(advantage.shape, 1 / len(advantage))
    given = {"old_logprob": None, "advantage": advantage, "token_weight": weight}
    return policy_loss(logprob, **given, objective=Objective.preset("grpo"))[0]


check_interface("kindling 1.0", kindling.__version__, {kindling.loss: ("logprob", "advantage")})
kindling.loss = loss
''',
        "tests/integrations/test_install_lines.py": (
            ('    "trl": "trl",\n', '    "trl": "trl",\n    "kindling": "kindling",\n'),
        ),
    },
    """
import importlib, sys, types, torch
library = types.ModuleType("kindling")
library.__version__, library.loss = "1.0", lambda logprob: 0
sys.modules["kindling"] = library
try:
    importlib.import_module("rlplus.integrations.kindling")
except ImportError as error:
    assert "want kindling 1.0, whose <lambda> takes (logprob, advantage)" in str(error)
else:
    raise AssertionError("another interface was taken")
library.loss = lambda logprob, advantage: 0
importlib.import_module("rlplus.integrations.kindling")
logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
library.loss(logprob, torch.tensor([1.0, -1.0])).backward()
torch.testing.assert_close(logprob.grad, torch.tensor([-0.5, 0.5]))
""",
    ("tests/integrations/test_install_lines.py", "-k=kindling"),
)

TO_THE_LOSS = (SURROGATE, PRESET, BACKEND, INTEGRATION)
