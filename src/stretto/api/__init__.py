"""The commands as Python functions.

Settings are a :class:`~stretto.config.Config`, a recipe's name, a ``.toml`` file or a run's folder.
Keywords change a section by a mapping (``rollout={"batch": 64}``) or a single setting
(``rollout__batch=64``). Objects may replace names: a model, a list of rows, a reward function.
Modules of this package load on first use, and heavy libraries when a function is called.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.api.alignment import align, resume_alignment
    from stretto.api.models import benchmark, evaluate, generate, label, label_responses, measure
    from stretto.api.runs import compare, report, simulate
    from stretto.api.settings import RESUMABLE, changed, check_resumable, load_recipe
    from stretto.api.training import Begun, begin, execute, resume, sft, train, train_reward_model

_HOMES = {
    "alignment": ("align", "resume_alignment"),
    "models": ("benchmark", "evaluate", "generate", "label", "label_responses", "measure"),
    "runs": ("compare", "report", "simulate"),
    "settings": ("RESUMABLE", "changed", "check_resumable", "load_recipe"),
    "training": ("Begun", "begin", "execute", "resume", "sft", "train", "train_reward_model"),
}
"""Names by the module that is imported on their first use."""

__all__ = [
    "RESUMABLE",
    "Begun",
    "align",
    "begin",
    "benchmark",
    "changed",
    "check_resumable",
    "compare",
    "evaluate",
    "execute",
    "generate",
    "label",
    "label_responses",
    "load_recipe",
    "measure",
    "report",
    "resume",
    "resume_alignment",
    "sft",
    "simulate",
    "train",
    "train_reward_model",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"stretto.api.{module}"), name)
    raise AttributeError(f"module 'stretto.api' has no attribute '{name}'")
