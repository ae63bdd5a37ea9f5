"""The plan of a sampled backward pass."""

import pytest
from plan_cases import IN_BF16, make_plan, paper

from rlplus.tools.plan import make_cluster, show_bytes
from rlplus.tools.plan.advice import advise


def test_a_sampled_backward_pass_has_no_accumulator_of_the_whole_weight():
    """12 tokens of each of 32,768 rows, 26,837 different ones; a quarter of the threshold leaves twice as many.

    The input's gradient is a sum in fp32. Weights' gradients in fp32 have no accumulator beside them.
    """
    cluster, N, V, H = make_cluster(8, "a100-80g"), 32_768, 152_064, 3584

    def planned(*overrides):
        plan = make_plan(paper(*overrides), cluster)
        return plan.memory.parts["head"]["head"], plan.seconds["forward and backward"]

    finer = f"train.backward_threshold={2.0**-14}"
    for options, own in (((), 0), ((IN_BF16,), 4 * H * (26_837 - V))):
        (exact, slow), (sampled, fast) = (planned(f"train.backward={name}", *options) for name in ("exact", "sampled"))
        assert sampled - exact == pytest.approx(4 * N * H + 80 * 12 * N + own, rel=1e-3)
        assert slow > fast
    assert planned("train.backward=sampled", finer)[0] - planned("train.backward=sampled")[0] == 80 * 12 * N


def test_the_advice_has_a_sampled_backward_pass_where_it_takes_less():
    """In the head, where it is the fullest moment; a run has the backward pass that it began with."""
    cluster, short = make_cluster(8, "a100-40g"), "train.tokens_per_micro_batch=9216"
    text = advise(paper(short, IN_BF16), cluster, "forward_backward")
    exact, sampled = (
        make_plan(paper(short, IN_BF16, f"train.backward={name}"), cluster).memory for name in ("exact", "sampled")
    )
    saved = exact.total("head") - max(map(sampled.total, ("head", "backward")))
    assert saved > 0
    assert f"in a new run and train.backward=sampled (-{show_bytes(saved)}), whose gradients have the exact" in text
    for options in ((short,), (IN_BF16,)):  # gradients in fp32 have no accumulator to save; layers take more
        assert "train.backward" not in advise(paper(*options), cluster, "forward_backward")
    refused = paper(short, IN_BF16, "train.backend=reference")
    assert "train.backward" not in advise(refused, cluster, "forward_backward")
