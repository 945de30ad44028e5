"""One recipe = one typed object. Every setting stands in this package, with its help.

The sections are handed to the components they belong to; nothing else reads settings. Contradictions
are refused here, at construction, before anything heavy is loaded.
"""

from stretto.config.algorithm import AlgorithmConfig
from stretto.config.base import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
    require_seed,
)
from stretto.config.cluster import ClusterConfig, ProcessConfig
from stretto.config.knobs import KNOBS, PRESETS, Knobs, PresetName
from stretto.config.run import Config
from stretto.config.schedule import ScheduleConfig
from stretto.config.sections import (
    CriticConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
)
from stretto.config.supervised import (
    DemonstrationsConfig,
    PairsConfig,
    RewardModelConfig,
    RowsConfig,
    SftConfig,
    SupervisedConfig,
)
from stretto.config.training import OptimizerConfig, PipelineConfig, TrainingConfig

__all__ = [
    "KNOBS",
    "PRESETS",
    "AlgorithmConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DemonstrationsConfig",
    "Fraction",
    "Knobs",
    "ModelConfig",
    "NonNegative",
    "NonNegativeInt",
    "ObserveConfig",
    "OptimizerConfig",
    "PairsConfig",
    "PipelineConfig",
    "PositiveInt",
    "PresetName",
    "ProcessConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RowsConfig",
    "ScheduleConfig",
    "Section",
    "Seed",
    "SftConfig",
    "SupervisedConfig",
    "TaskConfig",
    "TrainingConfig",
    "require_seed",
]
