"""Liger's own tests of its GRPO loss with our operation in its place.

    LIGER=path/to/liger_kernel-0.8.5 pytest -m peers tests/peers/test_peers_liger.py

A checkout or the unpacked sdist (`pip download --no-deps --no-binary :all: liger-kernel`); it needs liger-kernel and
transformers beside rlplus.
"""

from pathlib import Path

import own_tests
import pytest

pytestmark = pytest.mark.peers
CHECKOUT = own_tests.checkout("LIGER")


def test_their_own_tests_of_the_loss_pass_with_ours(tmp_path: Path) -> None:
    found = own_tests.outcomes(CHECKOUT, "test/transformers/test_grpo_loss.py", "liger_op", tmp_path / "report.xml")
    assert not {name: outcome for name, outcome in found.items() if outcome.result == "failed"}
    counts = own_tests.counts(found)
    assert counts["passed"] > 90
    own = {reason for reason in counts if "is not supported for loss_type" in reason}
    assert counts.keys() - own == {
        "passed",
        "not applicable: rlplus has no vespo",
        "not applicable: the bound of a cispo weight is at least 1 in rlplus",
        "not applicable: the message of a refusal of Liger's",
    }
