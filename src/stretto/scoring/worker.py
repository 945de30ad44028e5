"""The process that reward functions run in: ``python -m stretto.scoring.worker``.

It speaks JSON lines over its original standard input and output; whatever the function's code
prints goes to standard error. It ends with its parent, however that ends, and whatever it is doing.
::

    in    {"task": settings, "seed": n}  or  {"url": of a server}  or                  once, first
          {"file": path, "module": name or "", "root": folder it is in, "function": name}
    out   {"ready": {"columns": names or null for all, "required": names, "environments": boolean}}
          {"refused": "ConfigError" or "TaskError", "message": text, "code": text}     and the end
    in    [sample, ...]                                                                repeatedly
    out   {"at": place in the list, "value": number, "extra": values by name, if any}
          or  {"at": place, "error": text}
          {"done": null, or what went wrong with the whole list}                       comes last

Every line in is ``{"request": number, "body": what stands above}``; every line out has two more
keys, ``"request"`` with the number that it answers and ``"pid"`` with the sender's process id.
Verdicts come in any order. A null ``"value"`` says that the function does not apply
to the sample.

A sample of a task is ``{"index", "fingerprint", "response"}``; of a function ``{"prompt", "asked",
"response", "tokens", "data", "state"}``, where "asked" is the row's own text or messages. That of
an episode has its "messages" behind the prompt, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.errors import RewardError, StrettoError
from stretto.outside import callables, import_module, member_of, not_defined
from stretto.scoring.conventions import (
    TIMED_OUT,
    RewardFunction,
    Sample,
    Verdict,
    as_number,
    one_by_one,
    recognise,
)
from stretto.workers.channel import Channel

SETTING = "reward.sources"


def main() -> None:
    """Open the reward function that the first line names, then answer until the parent goes."""
    channel = Channel()
    try:
        function = open_function(channel.next_request())
    except StrettoError as error:
        refusal = {"refused": type(error).__name__, "message": str(error), "code": error.code}
        channel.send(refusal)
        return
    channel.send({"ready": ready(function)})
    while True:
        samples = channel.next_request()
        channel.send({"done": function.run(samples, channel.send)})


def ready(function: RewardFunction) -> dict[str, Any]:
    """Return what the parent must know of a function."""
    return {
        "columns": function.columns,
        "required": function.required,
        "environments": function.environments,
    }


def open_function(opening: Mapping[str, Any]) -> RewardFunction:
    """Open the reward function that a first line names, or raise ConfigError or TaskError."""
    if "task" in opening:
        return _open_task(opening["task"], opening["seed"])
    if "url" in opening:
        from stretto.scoring.remote import open_server  # it imports an HTTP client

        return open_server(opening["url"])
    file, name = opening["file"], opening["function"]
    module = import_module(file, opening["module"], opening["root"], SETTING)
    function = member_of(module, opening, SETTING)
    if not callable(function):
        raise not_defined(file, name, callables(module), SETTING)
    return recognise(function, file, name)


def _open_task(settings: Mapping[str, Any], seed: int) -> RewardFunction:
    from stretto.config import TaskConfig
    from stretto.tasks import load
    from stretto.tasks.base import fingerprint

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


if __name__ == "__main__":
    main()
