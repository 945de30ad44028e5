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

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.errors import ConfigError, RewardError, StrettoError
from stretto.scoring.conventions import (
    TIMED_OUT,
    RewardFunction,
    Sample,
    Verdict,
    as_number,
    describe,
    in_this_process,
    not_defined,
    one_by_one,
    recognise,
)
from stretto.scoring.remote import open_server
from stretto.workers.channel import Channel


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
        return open_server(opening["url"])
    file, name = opening["file"], opening["function"]
    function = import_named(file, opening["module"], opening["root"], name)
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


def import_named(file: str, named: str, root: str, name: str) -> Callable[..., Any]:
    """Import the function ``name`` of what :func:`import_module` imports."""
    module = import_module(file, named, root)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    raise not_defined(file, name, callables(module))


def import_module(file: str, named: str, root: str, setting: str = "reward.sources") -> ModuleType:
    """Import the module ``named`` in the folder ``root``, or a Python file: this may import its
    neighbours and, where it is a module of a package, the rest of that.

    Raises ConfigError, which names the setting.
    """
    if named:
        sys.path.append(root)
    try:
        load = importlib.import_module if named else _load
        return in_this_process(load, named or file)
    except BaseException as error:  # SystemExit too: the file may call sys.exit
        raise ConfigError(
            f"{setting}: '{file}' must be importable; importing it raised {describe(error, file)}",
            "import-failed",
        ) from error


def callables(module: ModuleType) -> list[str]:
    """Return the names of the functions and classes that a module defines itself."""
    return [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _load(file: str) -> ModuleType:
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    package = list(takewhile(_is_package, path.parents))
    if not package or package[-1].name in sys.modules:
        return _load_alone(path)
    sys.path.insert(0, str(package[-1].parent))
    named = ".".join(folder.name for folder in reversed(package))
    try:
        importlib.import_module(named)
    except Exception:  # whatever its __init__ raises
        with suppress(ImportError):  # as of a neighbour: the package's error says why
            return _load_alone(path)
        raise
    return importlib.import_module(f"{named}.{path.stem}")


def _is_package(folder: Path) -> bool:
    return folder.name.isidentifier() and (folder / "__init__.py").is_file()


def _load_alone(path: Path) -> ModuleType:
    # The name that others import it by: processes that are not forked find its functions by it.
    known_as = f"stretto_reward_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(known_as, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
