"""The configuration of a run: typed, frozen, checked as a whole before anything is loaded."""

from rlplus.config.algorithm_section import AlgorithmConfig
from rlplus.config.benchmarks import BENCHMARKS, Benchmark, benchmark_name
from rlplus.config.data_section import DataConfig
from rlplus.config.folders import (
    RESULTS,
    RUN,
    SAMPLES,
    STARTS,
    check_report_folder,
    check_run_folder,
    check_samples_folder,
    is_run,
    read_starts,
)
from rlplus.config.loading import (
    load_config,
    load_stages,
    merged,
    problem_lines,
    read_yaml,
    recorded_config,
    with_first_model,
)
from rlplus.config.path_checks import (
    HUB_PREFIX,
    check_data_files,
    check_evaluation_files,
    check_model_path,
    check_output_folder,
    check_trackers,
    check_training_files,
    model_problem,
    read_chat_template,
    shipped_architecture,
    split_hub_path,
)
from rlplus.config.rollout_section import RolloutConfig
from rlplus.config.schema import Config
from rlplus.config.sections import (
    TRACKERS,
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    ScratchModel,
    ValidationConfig,
)
from rlplus.config.train_section import TrainConfig

__all__ = [
    "BENCHMARKS",
    "HUB_PREFIX",
    "RESULTS",
    "RUN",
    "SAMPLES",
    "STARTS",
    "TRACKERS",
    "AlgorithmConfig",
    "Benchmark",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "ScratchModel",
    "TrainConfig",
    "ValidationConfig",
    "benchmark_name",
    "check_data_files",
    "check_evaluation_files",
    "check_model_path",
    "check_output_folder",
    "check_report_folder",
    "check_run_folder",
    "check_samples_folder",
    "check_trackers",
    "check_training_files",
    "is_run",
    "load_config",
    "load_stages",
    "merged",
    "model_problem",
    "problem_lines",
    "read_chat_template",
    "read_starts",
    "read_yaml",
    "recorded_config",
    "shipped_architecture",
    "split_hub_path",
    "with_first_model",
]
