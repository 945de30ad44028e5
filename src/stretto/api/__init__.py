"""Stretto from Python: what the commands do, as functions.

Settings are a :class:`~stretto.config.Config`, a recipe's name, a ``.toml`` file or a run's folder.
Single settings are changed by keyword: a whole section as a mapping (``rollout={"batch": 64}``), or
one setting behind its section's name (``rollout__batch=64``). What a command takes by name can also
be brought as an object: a model, a list of rows, a reward function. Nothing heavy is imported
before a function is called, and of this package only what is asked for.
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
"""Names by the module that they are loaded from when they are first asked for."""

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
