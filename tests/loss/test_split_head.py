"""A head split over the vocabulary, on ranks that are threads: against the closed form in float64, and mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from head_cases import EVERYTHING, Head, absolute_sums, check_fp64, check_precision, closed, on_policy, run, sample, to
from split_heads import CPP, NAMES, SPLITS, TRITON, V, rows_of, split_run
from thread_ranks import one_launch_at_a_time, together
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.loss.backends import sharded

lock = one_launch_at_a_time
NARROW = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("mb", [0.002, None])
def test_loss_and_gradients_are_those_of_the_whole_head(split: tuple[int, ...], mb: float | None) -> None:
    """Chunks of a few tokens, or one."""
    head, constants = sample(19, V)
    got = split_run(split, head, constants, EVERYTHING, backend="torch", max_scratch_mb=mb)
    check_fp64(got, head, constants, EVERYTHING)


@pytest.mark.parametrize("transform", [{"temperature": 0.7}, {"logit_softcap": 3.0, "logit_scale": 0.5}], ids=str)
def test_transforms_of_the_logits(transform: dict[str, float]) -> None:
    head, constants = sample(9, V)
    rows = {"temperature": torch.linspace(0.5, 2, 9, dtype=torch.float64)} if "logit_softcap" in transform else {}
    got = split_run((6, 6, 6, 5), head, constants, EVERYTHING, backend="torch", **(transform | rows))
    check_fp64(got, head, constants, EVERYTHING, **(transform | rows))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("backend", ["torch", CPP, TRITON])
@pytest.mark.parametrize("split", [(12, 11), (1, 0, 19, 3)], ids=str)
def test_every_backend(split: tuple[int, ...], backend: str, dtype: torch.dtype, lock: None) -> None:
    head, constants = sample(19, V, dtype=dtype)
    head = on_policy(head)
    got = split_run(split, head, constants, EVERYTHING, backend=backend, max_scratch_mb=0.003)
    check_precision(got, head, constants, EVERYTHING, gemm_dtype=torch.float32)


@pytest.mark.parametrize("backend", ["torch", CPP, TRITON])
def test_a_rank_whose_logits_are_all_impossible(backend: str, lock: None) -> None:
    """As those of a padded vocabulary: a bias of -inf."""
    head, constants = sample(9, V, dtype=torch.float32)
    head["bias"][12:] = -torch.inf
    head["target"] = head["target"] % 12
    got = split_run((12, 11), head, constants, Objective("clip", "mis"), backend=backend)
    own = {name: head[name][:12] for name in NAMES}
    want = run(head | own, constants, Objective("clip", "mis"), backend="reference")
    for name in ("logprob", "entropy", "dhidden"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["dweight"][:12], want["dweight"], rtol=1e-5, atol=1e-6)
    assert (got["dweight"][12:] == 0).all()


def test_a_nearly_sure_token_keeps_its_digits_on_whichever_rank_it_is() -> None:
    """1 - p of 1e-7 in fp32, with the token's row on each of the ranks."""
    weight, hidden = torch.zeros(V, 1), torch.ones(V, 1)
    target, one = torch.arange(V), torch.ones(V)
    z = torch.log(torch.tensor((V - 1) / 1e-7, dtype=torch.float64)).float()  # p = 1 / (1 + 22 e^-z)

    def work(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        out = []
        for y in range(V):
            own = rows_of(
                {"weight": weight.clone().index_fill_(0, target[y], z), "bias": weight[:, 0]}, (9, 5, 9), rank
            )
            leaf = hidden[:1].clone().requires_grad_()
            logprob, _ = linear_logprob(leaf, own["weight"], target[y : y + 1], group=group, backend="torch")
            (dhidden,) = torch.autograd.grad(logprob.sum(), leaf)
            out.append(torch.stack([logprob[0].detach(), dhidden[0, 0] / z]))
        return torch.stack(out), one

    (found, _), *_ = together(3, work)
    rest = -torch.expm1(-torch.log1p((V - 1) * torch.exp(-z.double())))
    assert (found[:, 0].double() / torch.log1p(-rest) - 1).abs().max() < 1e-4
    assert (found[:, 1].double() / rest - 1).abs().max() < 1e-4


@pytest.mark.parametrize("backend", ["torch", CPP])
def test_logprobs_and_their_gradients(backend: str) -> None:
    head, _ = sample(19, V, dtype=torch.float32)
    target = head["target"].clone()
    target[3] = -100
    g = torch.Generator().manual_seed(1)
    up = [torch.randn(19, generator=g, dtype=torch.float64) for _ in range(2)]

    def call(part: Head, **options: Any) -> tuple[Tensor, ...]:
        leaf = {k: v.detach().clone().requires_grad_() for k, v in part.items() if k != "target"}
        out = linear_logprob(**leaf, target=target, **options)
        pulled = sum((x * y.to(x.dtype)).sum() for x, y in zip(out, up, strict=True))
        return *(x.detach() for x in out), *torch.autograd.grad(pulled, list(leaf.values()))

    def work(rank: int, group: Any) -> tuple[Tensor, ...]:
        return call(rows_of(head, (9, 0, 14), rank), group=group, backend=backend, max_scratch_mb=0.002)

    found = together(3, work)
    want = call(to(head, torch.float64), backend="reference")
    got = *found[0][:3], torch.cat([x[3] for x in found]), torch.cat([x[4] for x in found])
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=2e-6)


def test_the_gradient_of_the_weight_is_added_where_it_is_wanted() -> None:
    head, constants = sample(19, V)
    start = torch.randn(V, head["hidden"].shape[1], dtype=torch.float64)
    exact = closed(head, constants, EVERYTHING)
    sums = absolute_sums(head, constants, EVERYTHING, exact)

    def work(rank: int, group: Any) -> Tensor:
        own = rows_of(head, (20, 3), rank)
        total = rows_of({"weight": start, "bias": start[:, 0]}, (20, 3), rank)["weight"].clone()
        options = {"objective": EVERYTHING, "backend": "torch", "group": group, "weight_grad": total}
        linear_policy_loss(**own, **({"old_logprob": None} | constants), **options)
        return total

    got = torch.cat(together(2, work)) - start
    bound = 32 * torch.finfo(torch.float64).eps * (sums["dweight"].max() + start.abs().max())
    assert (got - exact["dweight"]).abs().max() <= bound


def test_rows_of_weight_0_may_hold_anything() -> None:
    head, constants = sample(19, V)
    off = constants["token_weight"] == 0
    assert off.any()
    assert not off.all()
    objective = Objective("clip", "mis")
    want = split_run((12, 11), head, constants, objective, backend="torch")
    dirty = head | {"hidden": head["hidden"].masked_fill(off[:, None], torch.nan)}
    got = split_run((12, 11), dirty, constants, objective, backend="torch")
    assert torch.equal(got["dweight"], want["dweight"])
    assert torch.equal(got["dhidden"], want["dhidden"])


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_distributed_tensor_says_where_its_rows_are(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients come back as the parameters are."""
    met = []
    monkeypatch.setattr(sharded, "meet", lambda *args, meet=sharded.meet: met.append(meet(*args)) or met[-1])
    head, constants = sample(19, V)
    leaf = {name: head[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    split = {name: distribute_tensor(leaf[name].detach(), mesh, [Shard(0)]).requires_grad_() for name in NAMES}
    rest = {"old_logprob": None, **constants, "objective": EVERYTHING, "backend": "torch"}
    out = linear_policy_loss(leaf["hidden"], split["weight"], head["target"], bias=split["bias"], **rest)
    out.loss.backward()
    grads = {f"d{name}": x.grad for name, x in split.items()}
    assert all(g.placements == (Shard(0),) for g in grads.values())
    assert [shards.lengths for shards in met] == [[V]]
    got = out._asdict() | {"dhidden": leaf["hidden"].grad} | {name: g.to_local() for name, g in grads.items()}
    check_fp64(got, head, constants, EVERYTHING)


def test_other_distributed_tensors_are_refused(mesh: DeviceMesh) -> None:
    head, constants = sample(5, V)
    inputs = head | {"old_logprob": None} | constants
    copies, split = (distribute_tensor(head["weight"], mesh, [place]) for place in (Replicate(), Shard(0)))
    for weight, options, message in (
        (copies, {}, r"want weight a plain tensor, or a DTensor of one .*got a DTensor, .*\(Replicate\(\),\)"),
        (split, {"group": mesh.get_group()}, "and no group beside it"), (split, {}, "want bias split as weight is"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            linear_policy_loss(**(inputs | {"weight": weight}), **options)


# ---- mistakes


def test_ranks_with_tokens_of_their_own_are_refused_on_every_rank() -> None:
    """As under FSDP, which splits weights in the same way."""
    head, constants = sample(19, V)

    def refused(change: Any) -> list[str]:
        def work(rank: int, group: Any) -> str:
            mine, rest = change(rank)
            with pytest.raises(ValueError, match="want the same tokens on all ranks") as found:
                run(rows_of(mine, (12, 11), rank), rest, EVERYTHING, group=group, backend="torch")
            return str(found.value)

        return together(2, work)

    def fewer(rank: int) -> Any:
        keep = slice(0, 19 - rank)
        rows = {name: head[name][keep] for name in ("hidden", "target")}
        return head | rows, {k: v[keep] for k, v in constants.items()}

    def others(rank: int) -> Any:
        return head | {"target": head["target"].roll(rank)}, constants

    def other(name: str, by: float) -> Any:
        def change(rank: int) -> Any:
            if name in head:
                return head | {name: head[name] + by * rank * torch.randn_like(head[name])}, constants
            return head, constants | {name: constants[name] * (1 + by * rank)}

        return change

    assert all("got [19, 18] tokens" in text for text in refused(fewer))

    def one_more(rank: int) -> Any:
        """One target, so that the checksum differs by less than a percent."""
        first = int(constants["token_weight"].nonzero()[0])
        target = head["target"].clone()
        target[first] = abs(target[first] - rank)
        return head | {"target": target}, constants

    assert all("with other targets on rank 1 than" in text for text in refused(others))
    assert all("with other targets on rank 1 than" in text for text in refused(one_more))
    for name, said in (("hidden", "hidden states"), ("token_weight", "token_weight"), ("advantage", "advantage")):
        assert all(f"with other {said} on rank 1 than" in text for text in refused(other(name, 0.5)))


def test_ranks_whose_calls_differ_are_refused_on_every_rank() -> None:
    """Among them one whose hidden states need no gradient, for which the others would wait."""
    head, constants = sample(19, V)
    inputs = {"old_logprob": None, **constants, "backend": "torch"}

    def work(rank: int, group: Any) -> None:
        own = rows_of(head, (12, 11), rank)
        leaf = head["hidden"].clone().requires_grad_(rank == 0)
        for change in ({"temperature": 1 + rank}, {"objective": ("grpo", "rlplus")[rank]}, {"hidden": leaf}):
            with pytest.raises(ValueError, match=r"want the same call on all ranks .* got another on rank 1 than"):
                linear_policy_loss(**(own | inputs | change), group=group)

    together(2, work)


def test_rounding_is_no_difference_between_ranks() -> None:
    """Nor is what rows of weight 0 hold."""
    head, constants = sample(19, V, dtype=torch.float32)
    off = constants["token_weight"] == 0
    assert off.any()

    def work(rank: int, group: Any) -> float:
        noise = 2**-9 * torch.randn(head["hidden"].shape, generator=torch.Generator().manual_seed(rank))
        hidden = (head["hidden"] * (1 + noise)).masked_fill(off[:, None], rank)
        own = rows_of(head | {"hidden": hidden, "target": head["target"].masked_fill(off, rank)}, (12, 11), rank)
        return run(own, constants, Objective("clip", "mis"), group=group, backend="torch")["loss"].item()

    assert len(together(2, work)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(19, 3)}, r"want hidden \(\.\.\., H\) and weight"),
        ({"token_weight": torch.full((19,), torch.nan)}, "want token_weight finite everywhere"),
        ({"temperature": torch.zeros(19)}, "want temperature finite and > 0"),
        ({"backend": "cuda"}, "want backend"),
    ],
    ids=["shape", "value", "temperature", "option"],
)
def test_an_error_on_one_rank_is_one_on_all(change: dict[str, Any], message: str) -> None:
    """Each rank raises, none waits: the one its own, the others that it has failed."""
    head, constants = sample(19, V, dtype=torch.float32)
    inputs = {"old_logprob": None, **constants, "backend": "torch"}
    short = {name: x for name, x in change.items() if name != "token_weight"}

    def work(rank: int, group: Any) -> None:
        own = rows_of(head, (12, 6, 5), rank)
        want = message if rank == 1 else "want no error on any rank of the group .* got one on rank 1"
        with pytest.raises(ValueError, match=want):
            linear_policy_loss(**(own | inputs | (change if rank == 1 else {})), group=group)
        if short:
            logprob_inputs = own | {"backend": "torch"} | (short if rank == 1 else {})
            with pytest.raises(ValueError, match=want):
                linear_logprob(**logprob_inputs, group=group)

    together(3, work)


def test_a_target_outside_the_whole_vocabulary_is_refused_on_every_rank() -> None:
    head, constants = sample(19, V)
    bad = head | {"target": head["target"].clone()}
    bad["target"][constants["token_weight"].nonzero()[0]] = V

    def work(rank: int, group: Any) -> None:
        with pytest.raises(ValueError, match=rf"want target in \[0, {V}\)"):
            run(rows_of(bad, (12, 11), rank), constants, EVERYTHING, group=group, backend="torch")

    together(2, work)


def test_other_ways_are_refused() -> None:
    head, constants = sample(5, V)

    def work(rank: int, group: Any) -> None:
        own = rows_of(head, (12, 11), rank)
        inputs = own | {"old_logprob": None} | constants
        for options, message in (
            ({"backend": "reference"}, "takes no .* split head"),
            ({"group": "tp"}, "want group a process group that this rank belongs to; got 'tp'"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                linear_policy_loss(**inputs, **({"group": group} | options))
        with pytest.raises(ValueError, match="it takes no split head"):
            linear_logprob(**own, group=group, backend="reference")

    together(2, work)
