"""`fuse_head` on two ranks: tensor parallelism's split head is used as it is, FSDP's is gathered by its hooks."""

from typing import Any

import processes
import pytest
import torch
from causal_lms import make
from fused_heads import TARGETS, close
from split_lms import MODELS, results, save_models
from trainer_runs import on_ranks

SPLIT = {"plan": [27, 27], "bias": [27, 26], "softcap": [27, 26], "softcap under FSDP": [27, 26]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: the results of all cases."""
    folder = tmp_path_factory.mktemp("split")
    save_models(folder)
    on_ranks(processes.SUPPORT / "split_lms.py", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def check(got: Any, want: Any) -> None:
    """Norms of layers are rounded in fp32, and the ranks' sums in another order."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for name, value in want.items():
            check(got[name], value)
    else:
        close(got.float(), want.float())


@pytest.mark.parametrize("case", SPLIT)
def test_a_head_of_tensor_parallelism_is_not_gathered(case: str, found: list[dict[str, Any]]) -> None:
    want = results(make(*MODELS[case.split()[0]]), slice(None))
    assert want.pop("met") == []
    for rank in found:
        got = dict(rank[case])
        assert got.pop("met") == [SPLIT[case]] * 4  # logprobs, their backward pass, the loss, logprobs
        check(got, want)


@pytest.mark.parametrize("case", ["FSDP alone", "FSDP alone, head apart"])
def test_fsdp_gathers_the_head_of_ranks_with_tokens_of_their_own(case: str, found: list[dict[str, Any]]) -> None:
    want = results(make(*MODELS["softcap"]), slice(None))
    assert [rank[case]["met"] for rank in found] == [[], []]
    for name in ("logprob", "entropy"):
        check(torch.cat([rank[case][name] for rank in found]), want[name])
    check(sum(rank[case]["loss"] for rank in found), want["loss"])
    assert TARGETS.shape[0] == len(found)
    for rank in found:
        for name in ("grads", "policy_grads"):  # FSDP takes the mean over ranks
            check({key: 2 * grad for key, grad in rank[case][name].items()}, want[name])
