"""The commands as Python functions.

Settings are a :class:`~stretto.config.Config`, a recipe's name, a ``.toml`` file or a run's folder.
Keywords change a section by a mapping (``rollout={"batch": 64}``) or a single setting
(``rollout__batch=64``). Objects may replace names: a model, a list of rows, a reward function.
Heavy libraries load when a function is called.
"""

from stretto.api.alignment import align as align
from stretto.api.alignment import resume_alignment as resume_alignment
from stretto.api.inference import benchmark as benchmark
from stretto.api.inference import evaluate as evaluate
from stretto.api.inference import generate as generate
from stretto.api.inference import label as label
from stretto.api.inference import label_responses as label_responses
from stretto.api.inference import measure as measure
from stretto.api.replays import replay as replay
from stretto.api.runs import compare as compare
from stretto.api.runs import report as report
from stretto.api.runs import simulate as simulate
from stretto.api.settings import BRANCHABLE as BRANCHABLE
from stretto.api.settings import RESUMABLE as RESUMABLE
from stretto.api.settings import changed as changed
from stretto.api.settings import check_resumable as check_resumable
from stretto.api.settings import load_recipe as load_recipe
from stretto.api.training import Begun as Begun
from stretto.api.training import begin as begin
from stretto.api.training import execute as execute
from stretto.api.training import resume as resume
from stretto.api.training import sft as sft
from stretto.api.training import train as train
from stretto.api.training import train_reward_model as train_reward_model
