"""TRL's own tests of GRPOTrainer, without and with our drop-in's `patch()`: they end the same.

    TRL=path/to/trl pytest -m peers tests/peers/test_peers_trl_own.py

A checkout of TRL; the TRL under test is the installed one, so tests for what changed between the two fail both times.
Beside TRL it needs peft, jmespath, pillow and, for Qwen's vocabulary, dashscope. Models and data are stand-ins; a test
of one without a stand-in is not applicable.
"""

from pathlib import Path

import own_tests
import pytest

pytest.importorskip("trl")

import trl_standins

pytestmark = pytest.mark.peers
CHECKOUT = own_tests.checkout("TRL")


def test_the_same_of_their_own_tests_pass_when_patched(tmp_path: Path) -> None:
    trl_standins.make(tmp_path)
    file = str(CHECKOUT / "tests/test_grpo_trainer.py")
    plain, patched = (
        own_tests.outcomes(
            *(tmp_path, file, "trl_tests", tmp_path / f"{patched}.xml"),
            **{"PATCHED": patched, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        )
        for patched in ("no", "yes")
    )
    ends = {name: (outcome.result, patched[name].result) for name, outcome in plain.items()}
    assert not {name: patched[name] for name, (before, after) in ends.items() if before != after}
    assert patched.keys() == plain.keys()
    assert list(ends.values()).count(("passed", "passed")) > 100
