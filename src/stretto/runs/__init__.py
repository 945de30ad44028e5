"""The training loop, supervised training, checkpoints, and how a run ends."""

from stretto.observe.run_directory import Best as Best
from stretto.observe.run_directory import TrainResult as TrainResult
from stretto.runs.finetuning import RewardModelResult as RewardModelResult
from stretto.runs.finetuning import SftResult as SftResult
from stretto.runs.finetuning import sft as sft
from stretto.runs.finetuning import train_reward_model as train_reward_model
from stretto.runs.training_loop import train as train
