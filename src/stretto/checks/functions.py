"""Users' functions in files, looked at without running them: syntax, imports, name, parameters."""

from __future__ import annotations

import ast
import importlib.util
import socket
from collections.abc import Collection, Iterable, Iterator
from inspect import Signature, signature
from pathlib import Path
from urllib.parse import urlsplit

from stretto.config.sections import RewardSource
from stretto.environments.processes import SETTING, locate_source
from stretto.errors import ConfigError
from stretto.machine import is_loopback
from stretto.scoring.conventions import ENVIRONMENTS, convention_of, not_defined
from stretto.scoring.functions import locate, require_columns

PATIENCE_S = 4.0
"""Seconds in which a reward server of this machine must take a connection."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.With, ast.For, ast.While)


def check(source: RewardSource, columns: Collection[str] | None) -> None:
    """Refuse a reward function that cannot be found, imported, or called with the columns of the
    dataset, if these are known already; and a server to which nothing should be sent.

    What cannot be told without running the file, such as the parameters of a name that is imported,
    is left to the process that runs it.
    """
    place = locate(source)
    if source.kind == "server":
        _check_server(source.name)
        return
    function = _find(Path(place["file"]), place["function"], "reward.sources")
    if isinstance(function, _FUNCTIONS) and not function.decorator_list:
        convention = convention_of(_signature(function), place["file"], place["function"])
        if columns is not None:
            needed = [name for name in convention.required if name != ENVIRONMENTS]
            require_columns(source.name, needed, columns)


def check_environments(sources: Iterable[str]) -> None:
    """Refuse tools or an environment that cannot be found or imported."""
    for place in map(locate_source, sources):
        _find(Path(place["file"]), place["function"], SETTING)


def _find(file: Path, name: str, setting: str) -> ast.stmt | None:
    """Return what a file defines by a name; ``None`` where only running it can tell.

    Raises ConfigError if the file cannot be read or imported, or has no such name.
    """
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text, file.name)
    except SyntaxError as error:
        line = f"line {error.lineno}: {(error.text or '').strip()}"
        message = f"{setting}: '{file}' is no Python: {error.msg}, {line}"
        raise ConfigError(message, "reward-file-syntax") from error
    except (OSError, ValueError) as error:
        message = f"{setting}: '{file}' cannot be read: {error}"
        raise ConfigError(message, "reward-file-unreadable") from error
    _check_imports(tree, file, setting)
    defined = dict(_defined(tree))
    found = defined.get(name)
    if found is None and not ({"*", "__getattr__"} & defined.keys() or "globals(" in text):
        known = [n for n, node in defined.items() if isinstance(node, (*_FUNCTIONS, ast.ClassDef))]
        raise not_defined(str(file), name, known, setting)
    return found


def _check_server(url: str) -> None:
    """Refuse a server of this machine that is not there; others may be behind proxies."""
    place = urlsplit(url)
    if not is_loopback(place.hostname):
        return
    try:
        port = place.port or (443 if place.scheme == "https" else 80)
        socket.create_connection((str(place.hostname), port), timeout=PATIENCE_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward.sources: '{url}' is not there: {error}. Start the reward server first",
            "no-reward-server",
        ) from error


def _check_imports(tree: ast.Module, file: Path, setting: str) -> None:
    """Refuse an import, outside of functions and of ``try``, of a module that is not there."""
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            beside = file.parent / name
            if not (beside.is_dir() or beside.with_suffix(".py").is_file() or _is_there(name)):
                raise ConfigError(
                    f"{setting}: '{file}' imports '{name}', which is not installed "
                    f"({file.name}, line {node.lineno}); install it, or put it beside the file",
                    "reward-import-missing",
                )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return True  # it cannot be told


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a file gives a meaning outside of functions, branches included."""
    waiting: list[ast.stmt] = list(tree.body)
    for node in waiting:  # which grows
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((t.id, node) for t in targets if isinstance(t, ast.Name))
        elif isinstance(node, _BRANCHES):
            for child in ast.iter_child_nodes(node):
                inner = child.body if isinstance(child, ast.ExceptHandler) else [child]
                waiting += [each for each in inner if isinstance(each, ast.stmt)]


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """Return the names, kinds and presence of defaults of the parameters; nothing is run."""
    parameters, nothing = function.args, ast.Constant(None)
    every = (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)
    for parameter in filter(None, (*every, parameters.vararg, parameters.kwarg)):
        parameter.annotation = None
    parameters.defaults = [nothing for _ in parameters.defaults]
    parameters.kw_defaults = [default and nothing for default in parameters.kw_defaults]
    alike = ast.fix_missing_locations(ast.Expression(ast.Lambda(parameters, nothing)))
    return signature(eval(compile(alike, "<parameters>", "eval")))
