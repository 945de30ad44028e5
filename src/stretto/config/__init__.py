"""Settings with their help: one recipe is one typed object.

Components get only their sections. Contradictions are refused at construction, before anything
heavy is loaded. No other code reads settings.
"""

from stretto.config.algorithm import AlgorithmConfig
from stretto.config.capabilities import ENVIRONMENT, Capabilities
from stretto.config.cluster_config import ClusterConfig, ProcessConfig
from stretto.config.environment import EnvironmentConfig
from stretto.config.knobs import KNOBS, PRESETS, Knobs, PresetName, ScheduleConfig
from stretto.config.run_config import Config
from stretto.config.sections import (
    CriticConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    TaskConfig,
)
from stretto.config.training_config import (
    DemonstrationsConfig,
    OptimizerConfig,
    PairsConfig,
    PipelineConfig,
    RewardModelConfig,
    RowsConfig,
    SftConfig,
    SupervisedConfig,
    TrainingConfig,
)

__all__ = [
    "ENVIRONMENT",
    "KNOBS",
    "PRESETS",
    "AlgorithmConfig",
    "Capabilities",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DemonstrationsConfig",
    "EnvironmentConfig",
    "Knobs",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PairsConfig",
    "PipelineConfig",
    "PresetName",
    "ProcessConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RowsConfig",
    "ScheduleConfig",
    "Section",
    "SftConfig",
    "SupervisedConfig",
    "TaskConfig",
    "TrainingConfig",
]
