"""Training with DeepSpeed: one readable loop (`loop.py`) and its parts."""

from rlplus.trainer.evaluations import evaluator, validator
from rlplus.trainer.loop import Evaluate, train
from rlplus.trainer.out_of_memory import OutOfMemory, phase_out_of_memory
from rlplus.trainer.provenance import processor_name
from rlplus.trainer.run import Run
from rlplus.trainer.run_parts import open_run
from rlplus.trainer.stop import Interrupted

__all__ = [
    "Evaluate",
    "Interrupted",
    "OutOfMemory",
    "Run",
    "evaluator",
    "open_run",
    "phase_out_of_memory",
    "processor_name",
    "train",
    "validator",
]
