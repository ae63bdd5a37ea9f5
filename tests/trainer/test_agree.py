"""Collectives of the trainer: on two real ranks, whose default group is for GPUs as far as the code can see; alone."""

import os
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from trainer_runs import environment, on_ranks, run_config

import rlplus
from rlplus.common.agree import initialize_distributed
from rlplus.train.trainer import open_run

TWO_RANKS = """
import math, sys
import torch.distributed as dist
from datetime import timedelta
from rlplus.common import agree
dist.init_process_group("gloo")
get_backend, dist.get_backend = dist.get_backend, lambda *_: "nccl"
rank, group = dist.get_rank(), agree._group()
assert group is not None and group is agree._group()
assert agree.largest(rank) == 1 and agree.largest(-rank) == 0 and agree.largest(rank == 0) == 1
assert agree.largest(math.inf if rank else 0) == math.inf
assert agree.sums(1, 10**rank) == [2, 11] and agree.sums(2**53 - 1, 0)[1] == 0
assert agree.gathered({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
assert agree.failures(None) == ""
assert agree.failures(OSError("full") if rank else None) == "rank 1: full"
assert agree.failures(OSError("rank 1: full") if rank else None) == "rank 1: full"
assert agree.failures(KeyError("a"), clear=(OSError,)) == "rank 0: KeyError('a'); rank 1: KeyError('a')"

# Rank 1 stays in its phase until rank 0 has given up waiting.
dist.get_backend = get_backend
store = dist.distributed_c10d._get_default_store()
try:
    if rank == 0:
        agree.phase("pack")
        store.wait(["phase of rank 1"])
        agree.timeout = timedelta(seconds=0.5)  # of the next collective, to which rank 1 does not come
        dist.distributed_c10d._set_pg_timeout(agree.timeout)
    else:
        agree.phase("export")
        store.get("rank 0 gave up")
    agree.largest(rank)
except ConnectionError as error:
    sys.stdout.write(f"{error}\\n")
store.set("rank 0 gave up", "")
"""


def on_two_ranks(folder: Path, text: str, *arguments: str) -> str:
    script = folder / "two_ranks.py"
    script.write_text(text)
    return on_ranks(script, *arguments)


def test_two_ranks_agree_and_name_the_one_that_is_late_with_its_phase(tmp_path: Path) -> None:
    said = on_two_ranks(tmp_path, TWO_RANKS)
    assert "rank 0, after 'pack', lost the other ranks: Timed out waiting 500ms for recv operation to compl" in said
    assert "The last phase that each began: rank 0 'pack', rank 1 'export'." in said
    assert "needs a larger train.collective_timeout_s than 0.5" in said


STORE_IS_GONE = """
import os, sys
import torch.distributed as dist
from rlplus.common import agree
dist.init_process_group("gloo")
agree.barrier()
if dist.get_rank() == 0:
    os._exit(0)  # with the store, which it held
try:
    for _ in range(100):
        agree.phase("pack")
    agree.barrier()
except ConnectionError as error:
    sys.stdout.write(f"{error}\\n")
"""


def test_a_rank_whose_store_is_gone_says_that_it_lost_the_others() -> None:
    """Not torchrun's store, which the launcher holds: DeepSpeed's launcher lets rank 0 hold it."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port()), "WORLD_SIZE": "2"}
    here |= {"PYTHONPATH": str(Path(rlplus.__file__).parents[1])}
    with ExitStack() as stack:
        command = [sys.executable, "-c", STORE_IS_GONE]
        ranks = [
            stack.enter_context(processes.started(command, environment() | here | {"RANK": str(rank)}, stdout=-1))
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=processes.PATIENCE_S)[0] for rank in ranks]
    assert said[1].startswith("rank 1, after 'pack', lost the other ranks: ")


EVERY_GROUP = """
import sys
import torch
import torch.distributed as dist
from rlplus.train.config import load_config
from rlplus.train.trainer import open_run
with open_run(load_config(sys.argv[1])):
    groups = list(dist.distributed_c10d._world.pg_map)
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    sys.stdout.write(f"{len(groups)} groups: {sorted(timeouts)}\\n")
"""


@pytest.mark.slow
def test_every_group_has_the_timeout_of_the_configuration(tmp_path: Path) -> None:
    """Also DeepSpeed's group, which would otherwise have torch's default."""
    model = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    train = {"sequence_parallel": 2, "collective_timeout_s": 1234.0}
    (tmp_path / "run.yaml").write_text(run_config(tmp_path, model={"scratch": model}, train=train).to_yaml())
    said = on_two_ranks(tmp_path, EVERY_GROUP, str(tmp_path / "run.yaml")).splitlines()
    assert len(said) == 2
    for line in said:
        count, timeouts = line.split(" groups: ")
        assert int(count) > 2
        assert timeouts == f"[{timedelta(seconds=1234)!r}]"


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_collectives_of_one_process_are_copies(new: bool, wait: bool) -> None:
    initialize_distributed()
    group = dist.new_group([0]) if new else None
    options = {"group": group, "async_op": wait}
    x = torch.arange(6.0).view(2, 3)

    def check(collective: object, *, like: Tensor = x) -> None:
        """`collective` takes the output, which holds nothing yet, and returns a handle to wait for."""
        output = torch.full_like(like, float("nan"))
        handle = collective(output)  # type: ignore[operator]
        if wait:
            handle.wait()
        assert torch.equal(output, like)

    for in_place in (
        lambda y: dist.all_reduce(y, **options),
        lambda y: dist.all_reduce(y, dist.ReduceOp.MAX, **options),
        lambda y: dist.broadcast(y, 0, **options),
        lambda y: dist.reduce(y, 0, **options),
    ):
        check(lambda y, in_place=in_place: in_place(y.copy_(x)))
    check(lambda y: dist.all_gather([y], x, **options))
    check(lambda y: dist.all_gather_into_tensor(y, x, **options))
    check(lambda y: dist.all_gather_into_tensor(y, x, **options), like=x.flatten())
    check(lambda y: dist.reduce_scatter(y, [x], **options))
    check(lambda y: dist.reduce_scatter_tensor(y, x, **options))
    check(lambda y: dist.all_to_all([y], [x], **options))
    check(lambda y: dist.all_to_all_single(y, x, **options))
    check(lambda y: dist.gather(x, [y], **options))
    check(lambda y: dist.scatter(y, [x], **options))
    for device in (None, torch.device("cpu")):

        def coalesced(y: Tensor, device: torch.device | None = device) -> object:
            with _coalescing_manager(group, device, async_ops=wait) as manager:
                dist.all_gather_into_tensor(y[0], x[0], group=group)
                dist.all_gather_into_tensor(y[1], x[1], group=group)
            return manager

        check(coalesced)
    dist.barrier(group)


def listening() -> set[str]:
    """The addresses on which this process listens, from the kernel's tables."""
    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def test_a_run_of_one_process_opens_no_port(tmp_path: Path) -> None:
    before = listening()
    with open_run(run_config(tmp_path, train={"zero_stage": 3})):
        assert listening() <= before
