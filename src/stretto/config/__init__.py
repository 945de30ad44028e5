"""Settings with their help: one recipe is one typed object.

Components get only their sections. Contradictions are refused at construction, before anything
heavy is loaded. No other code reads settings.
"""

from stretto.config.algorithm import AlgorithmConfig as AlgorithmConfig
from stretto.config.capabilities import ENVIRONMENT as ENVIRONMENT
from stretto.config.capabilities import Capabilities as Capabilities
from stretto.config.cluster_config import ClusterConfig as ClusterConfig
from stretto.config.cluster_config import ProcessConfig as ProcessConfig
from stretto.config.environment import EnvironmentConfig as EnvironmentConfig
from stretto.config.knobs import KNOBS as KNOBS
from stretto.config.knobs import PRESETS as PRESETS
from stretto.config.knobs import Knobs as Knobs
from stretto.config.knobs import PresetName as PresetName
from stretto.config.knobs import ScheduleConfig as ScheduleConfig
from stretto.config.run_config import Config as Config
from stretto.config.sections import ModelConfig as ModelConfig
from stretto.config.sections import ObserveConfig as ObserveConfig
from stretto.config.sections import RewardConfig as RewardConfig
from stretto.config.sections import RolloutConfig as RolloutConfig
from stretto.config.sections import Section as Section
from stretto.config.sections import TaskConfig as TaskConfig
from stretto.config.training_config import DemonstrationsConfig as DemonstrationsConfig
from stretto.config.training_config import OptimizerConfig as OptimizerConfig
from stretto.config.training_config import PairsConfig as PairsConfig
from stretto.config.training_config import PipelineConfig as PipelineConfig
from stretto.config.training_config import RewardModelConfig as RewardModelConfig
from stretto.config.training_config import RowsConfig as RowsConfig
from stretto.config.training_config import SftConfig as SftConfig
from stretto.config.training_config import SupervisedConfig as SupervisedConfig
from stretto.config.training_config import TrainingConfig as TrainingConfig
