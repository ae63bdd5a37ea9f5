"""Training with DeepSpeed: one readable loop (`loop.py`) and its parts."""

from rlplus.trainer.loop import Evaluate, train
from rlplus.trainer.model import prepare_model
from rlplus.trainer.run import Run
from rlplus.trainer.stop import Interrupted

__all__ = ["Evaluate", "Interrupted", "Run", "prepare_model", "train"]
