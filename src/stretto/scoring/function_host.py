"""Reward functions in a process of their own (see :mod:`stretto.workers.user_code`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from stretto.errors import RewardError
from stretto.outside import callables, import_module, member_of, not_defined
from stretto.scoring.conventions import (
    TIMED_OUT,
    RewardFunction,
    Sample,
    Send,
    Verdict,
    as_number,
    one_by_one,
    recognise,
)

SETTING = "reward.sources"


class FunctionHost:
    """Scores lists of samples by a reward function.
    ::

        {"task": settings, "seed": n}  or  {"url": of a server}  or                   once, first
        {"file": path, "module": name or "", "root": folder it is in, "function": name}
            -> {"columns": names or null for all, "required": names, "environments": boolean}
        {"do": "score", "samples": [...]}
            -> {"at": index in the list, "value": number, "extra": values by name, if any}
               or  {"at": index, "error": text}
            -> null, or an error of the complete list                                comes last

    Verdicts come in any order. If ``"value"`` is null, the function does not apply to the sample.

    A task's sample is ``{"index", "fingerprint", "response"}``. A function's is ``{"prompt",
    "asked", "response", "tokens", "data", "state"}``, in which "asked" is the row's own text or
    messages. In an episode it also has the "messages" after the prompt.
    """

    concurrent: ClassVar = False

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    @classmethod
    def open(cls, opening: Mapping[str, Any]) -> Self:
        if "task" in opening:
            return cls(_open_task(opening["task"], opening["seed"]))
        if "url" in opening:
            from stretto.scoring.remote import open_server  # it imports an HTTP client

            return cls(open_server(opening["url"]))
        file, name = opening["file"], opening["function"]
        module = import_module(file, opening["module"], opening["root"], SETTING)
        function = member_of(module, opening, SETTING)
        if not callable(function):
            raise not_defined(file, name, callables(module), SETTING)
        return cls(recognise(function, file, name))

    def ready(self) -> dict[str, Any]:
        columns, required = self._function.columns, self._function.required
        environments = self._function.environments
        return {"columns": columns, "required": required, "environments": environments}

    def answer(self, body: Mapping[str, Any], send: Send) -> str | None:
        return self._function.run(body["samples"], send)


def _open_task(settings: Mapping[str, Any], seed: int) -> RewardFunction:
    from stretto.config import TaskConfig
    from stretto.tasks import load
    from stretto.tasks.task import fingerprint

    task = load(TaskConfig.model_validate(settings), seed)
    task.require_verifier()

    def verify(sample: Sample) -> Verdict:
        index: int = sample["index"]
        if fingerprint(task.row(index).data) != sample["fingerprint"]:
            raise RewardError(
                f"row {index} as the verifier reads it is not the row that the prompt was made of: "
                "either its file changed during the run, or the rows follow the order of Python "
                "sets (set PYTHONHASHSEED=0 in the environment)"
            )
        before = task.timeouts
        value = task.verify(index, sample["response"])
        return TIMED_OUT if task.timeouts > before else {"value": as_number(value)}

    return RewardFunction(run=one_by_one(verify, entry=dict))
