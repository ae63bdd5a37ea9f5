"""Training with DeepSpeed: one readable loop (`loop.py`) and its parts."""

from rlplus.train.trainer.evaluations import evaluator, validator
from rlplus.train.trainer.loop import Evaluate, train
from rlplus.train.trainer.progress import Interrupted, OutOfMemory, phase_out_of_memory
from rlplus.train.trainer.provenance import processor_name
from rlplus.train.trainer.run import Run
from rlplus.train.trainer.run_parts import open_run

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
