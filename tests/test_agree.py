"""What ranks tell each other: on two real ones, whose default group is for GPUs as far as the code can see."""

import subprocess
import sys
from pathlib import Path

from trainer_runs import environment

import rlplus

TWO_RANKS = """
import math
import torch.distributed as dist
from rlplus import agree
dist.init_process_group("gloo")
dist.get_backend = lambda *_: "nccl"
rank, group = dist.get_rank(), agree._group()
assert group is not None and group is agree._group()
assert agree.largest(rank) == 1 and agree.largest(-rank) == 0 and agree.largest(rank == 0) == 1
assert agree.largest(math.inf if rank else 0) == math.inf
assert agree.sums(1, 10**rank) == [2, 11] and agree.sums(2**53 - 1, 0)[1] == 0
assert agree.gathered({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
assert agree.failures(None) == ""
assert agree.failures(OSError("full") if rank else None) == "rank 1: full"
assert agree.failures(KeyError("a"), clear=(OSError,)) == "rank 0: KeyError('a'); rank 1: KeyError('a')"
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_agree(tmp_path: Path) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    here = environment() | {"PYTHONPATH": str(Path(rlplus.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=here)
    assert done.returncode == 0, done.stderr[-3000:]
