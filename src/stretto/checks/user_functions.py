"""Checks users' functions in files without running them: syntax, imports, names, parameters."""

from __future__ import annotations

import ast
import builtins
import copy
import importlib.util
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stretto import outside
from stretto.config import Config
from stretto.config.sections import RewardSource, Rules, refuse
from stretto.environments.adapters import BEGINNINGS, unknown_environment
from stretto.environments.executors import SETTING, locate_source
from stretto.environments.tools import schema_of
from stretto.errors import ConfigError
from stretto.machine import is_loopback
from stretto.outside import not_defined
from stretto.scoring.conventions import ENVIRONMENTS, convention_of
from stretto.scoring.functions import locate, require_columns

PATIENCE_S = 4.0  # seconds within which a reward server on this machine must accept a connection
VERL = {"create", "execute", "release"}  # methods of verl's tools

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.With, ast.For, ast.While)


def check(source: RewardSource, columns: Collection[str] | None) -> None:
    """Refuse reward code that cannot be found, imported, or called with the dataset's columns
    (if known), and a local reward server that does not answer. Checks that need the file to run,
    for example of an imported function's parameters, are left to the process that runs it."""
    if source.kind.streams:
        check_member(source.model, "reward.sources")
    if source.kind.streams or source.kind.verifies:
        return
    place = locate(source)
    if source.kind.place == "url":
        _check_server(source.name)
        return
    function = _find(Path(place["file"]), place["function"], "reward.sources")
    if isinstance(function, _FUNCTIONS) and not function.decorator_list:
        convention = convention_of(
            signature(_without_body(function, hints=False)), place["file"], place["function"]
        )
        if columns is not None:
            needed = [name for name in convention.required if name != ENVIRONMENTS]
            require_columns(source.name, needed, columns)


def check_environments(sources: Iterable[str]) -> None:
    """Refuse sources that cannot be found or imported, are neither a tool nor an environment, or
    cannot be described to the policy. Checks that need the file to run are left out."""
    for place in map(locate_source, sources):
        file, name = Path(place["file"]), place["function"]
        _check_source(name, _find(file, name, SETTING), dict(_defined(_parsed(file, SETTING)[0])))


def check_member(name: str, setting: str) -> None:
    """Refuse other user code that cannot be found or imported, without running it."""
    place = outside.locate(name, setting)
    _find(Path(place["file"]), place["function"], setting)


def check_algorithm(config: Config) -> None:
    """Import a user's own algorithm, and refuse one that does not fit the run."""
    name, setting = config.algorithm.name, "algorithm.name"
    if not config.algorithm.is_outside:
        return
    check_member(name, setting)
    from stretto.algorithms import registry  # torch, which the user's code imports as well

    algorithm = registry.functions_of(config.algorithm)
    for role in ("targets", "policy_loss", "value_loss"):
        if (function := getattr(algorithm, role)) is None:
            continue
        try:
            signature(function).bind(*range(3))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{setting}: {role} of '{name}' cannot be called with three arguments ({error}); "
                "its parameters are (data, rewards, settings) for targets, and (tensor, inputs, "
                "settings) for a loss",
                "algorithm-signature",
            ) from error
    if config.algorithm.definition.critic != (algorithm.value_loss is not None):
        raise ConfigError(
            f"{setting}: '{name}' must have both critic=True and a value_loss, or neither",
            "algorithm-critic",
        )
    broken: Rules = {}
    config.algorithm.algorithm_rules(broken)
    config.algorithm_rules(broken)
    refuse(broken)


def _check_source(name: str, node: ast.AST | None, defined: Mapping[str, ast.stmt]) -> None:
    if isinstance(node, ast.Name) and node.id in defined:
        node = defined[node.id]
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
        _check_source(name, node.value, {k: v for k, v in defined.items() if v is not node})
    elif isinstance(node, ast.Dict) and node.values:
        for value in node.values:
            _check_source(name, value, defined)
    elif isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Dict):
        raise unknown_environment(name, f"a {type(node).__name__.lower()}")
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        methods = _methods(defined.get(node.func.id), defined)
        if methods is not None and not methods.keys() >= VERL:
            raise unknown_environment(name, f"an object of '{node.func.id}'")
    elif isinstance(node, ast.ClassDef):
        methods = _methods(node, defined)
        if methods is not None and not methods.keys() >= VERL:
            _check_class(name, methods)
    elif isinstance(node, _FUNCTIONS) and not node.decorator_list and _is_tool(node):
        schema_of(_without_body(node), name)


def _methods(node: ast.stmt | None, defined: Mapping[str, ast.stmt]) -> dict[str, ast.stmt] | None:
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
        return None
    methods: dict[str, ast.stmt] = {}
    for base in reversed(node.bases):
        base_name = base.id if isinstance(base, ast.Name) else ""
        inherited = {} if base_name == "object" else _methods(defined.get(base_name), defined)
        if inherited is None:
            return None
        methods |= inherited
    methods |= dict(_defined(ast.Module(node.body, [])))
    return None if "__getattr__" in methods else methods


def _check_class(name: str, methods: Mapping[str, ast.stmt]) -> None:
    steps, resets = "step" in methods, "reset" in methods
    if "run" in methods and not (steps or resets):
        return
    if not (BEGINNINGS & methods.keys() if steps else resets):
        raise unknown_environment(name, "a class")
    for key, method in methods.items():
        hidden = steps or key.startswith("_") or key in ("reset", "get_reward")
        if not hidden and isinstance(method, _FUNCTIONS) and not method.decorator_list:
            schema_of(_without_body(method, bound=True), name)


def _is_tool(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    parameters = function.args
    names = {p.arg for p in (*parameters.args, *parameters.kwonlyargs)}
    program = "base_url" in names or (function.name == "run" and parameters.kwarg)
    hint = function.returns
    plain = hint is None or not isinstance(hint, ast.Name | ast.Attribute | ast.Constant)
    return not program and (plain or (isinstance(hint, ast.Name) and hasattr(builtins, hint.id)))


def _without_body(
    function: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = False, hints: bool = True
) -> Callable[..., Any]:
    """Return an empty function with the same name, docstring and parameters, all hints ``str``."""
    stub = copy.deepcopy(function)
    parameters = stub.args
    hint = ast.Name("str", ast.Load()) if hints else None
    first = [*parameters.posonlyargs, *parameters.args][:1] if bound else []
    arguments = (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)
    for parameter in filter(None, (*arguments, parameters.vararg, parameters.kwarg)):
        parameter.annotation = parameter.annotation and hint
    for group in (parameters.posonlyargs, parameters.args):
        group[:] = [parameter for parameter in group if parameter not in first]
    nothing = ast.Constant(None)
    parameters.defaults = [nothing for _ in parameters.defaults]
    parameters.kw_defaults = [default and nothing for default in parameters.kw_defaults]
    stub.returns = None
    stub.body = [ast.Expr(ast.Constant(ast.get_docstring(function, clean=False)))]
    scope: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([stub], [])), "<tool>", "exec"), scope)
    tool: Callable[..., Any] = scope[function.name]
    return tool


def _parsed(file: Path, setting: str) -> tuple[ast.Module, str]:
    try:
        text = file.read_text(encoding="utf-8")
        return ast.parse(text, file.name), text
    except SyntaxError as error:
        line = f"line {error.lineno}: {(error.text or '').strip()}"
        message = f"{setting}: '{file}' is no Python: {error.msg}, {line}"
        raise ConfigError(message, "reward-file-syntax") from error
    except (OSError, ValueError) as error:
        message = f"{setting}: '{file}' cannot be read: {error}"
        raise ConfigError(message, "reward-file-unreadable") from error


def _find(file: Path, name: str, setting: str) -> ast.stmt | None:
    """Return a name's definition. It is ``None`` if only running the file shows it."""
    tree, text = _parsed(file, setting)
    _check_imports(tree, file, setting)
    defined = dict(_defined(tree))
    definition = defined.get(name)
    if definition is None and not ({"*", "__getattr__"} & defined.keys() or "globals(" in text):
        kinds = (*_FUNCTIONS, ast.ClassDef, ast.Call)  # a call makes an object
        callables = [
            n for n, node in defined.items() if isinstance(getattr(node, "value", node), kinds)
        ]
        raise not_defined(str(file), name, callables, setting)
    return definition


def _check_server(url: str) -> None:
    """Refuse a server of this machine that does not answer. Others may be behind proxies."""
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
    """Refuse a top-level import of a missing module. Imports in functions and ``try`` may fail."""
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            path = file.parent / name
            if not (path.is_dir() or path.with_suffix(".py").is_file() or _is_there(name)):
                raise ConfigError(
                    f"{setting}: '{file}' imports '{name}', which is not installed "
                    f"({file.name}, line {node.lineno}); install it, or put it beside the file",
                    "reward-import-missing",
                )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return True  # unknown, so it is not refused


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    waiting: list[ast.stmt] = list(tree.body)
    for node in waiting:  # the list grows in the loop
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
                waiting += [statement for statement in inner if isinstance(statement, ast.stmt)]
