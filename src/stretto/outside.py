"""Loads the user's own code, named by 'file.py:name' or 'package.module:name' in settings."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar

from stretto.errors import ConfigError, StrettoError, is_out_of_memory, nearest

P = ParamSpec("P")
T = TypeVar("T")


def parts(name: str) -> tuple[str, str] | None:
    """Split 'file.py:name' or 'package.module:name'. Returns ``None`` for other names."""
    home, _, member = name.rpartition(":")
    is_home = Path(home).suffix == ".py" or all(map(str.isidentifier, home.split(".")))
    return (home, member) if is_home and member.isidentifier() else None


def absolute(name: str) -> str:
    """Return the name of code with its file's absolute path, for processes in other folders."""
    home, member = parts(name) or ("", "")
    return f"{Path(home).expanduser().resolve()}:{member}" if home.endswith(".py") else name


def locate(name: str, setting: str) -> dict[str, str]:
    """Return absolute path, module and root folder (both empty for a file), and member of code.
    Raises ConfigError if the file or module is missing.
    """
    location = parts(name)
    if location is None:
        raise ConfigError(
            f"{setting}: '{name}' is neither 'file.py:name' nor 'package.module:name'",
            "unknown-source",
        )
    home, member = location
    if not home.endswith(".py"):
        path, root = _file_of(name, home, setting)
        return {"file": str(path.resolve()), "module": home, "root": root, "function": member}
    path = Path(home).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{setting}: '{name}' names the file '{path}', which is not there (looked "
            f"for from {Path.cwd()})",
            "no-reward-file",
        )
    return {"file": str(path.resolve()), "module": "", "root": "", "function": member}


_loaded: dict[tuple[Path, str], Any] = {}  # imported members by working directory and name


def load(name: str, setting: str, kind: Any) -> Any:
    """Import a member of a file or module. Repeated calls in a process return the same object.

    Raises ConfigError, which names the setting, for a missing file, module or member, for code that
    raises during its import, and for an object of another ``kind``.
    """
    key = (Path.cwd(), name)
    if key not in _loaded:
        place, path = locate(name, setting), [*sys.path]
        try:
            module = import_module(place["file"], place["module"], place["root"], setting)
        finally:  # the new folders last, so that later imports of other code find the same modules
            sys.path[:] = path + [folder for folder in sys.path if folder not in path]
        _loaded[key] = member_of(module, place, setting)
    require(_loaded[key], kind, f"{setting}: '{name}'")
    return _loaded[key]


def require(value: Any, kind: Any, what: str) -> None:
    """Raise ConfigError if a user's object has another type."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"{what} is of type {type(value).__name__}, and must be a "
            f"{kind.__module__}.{kind.__name__}",
            "wrong-kind-of-object",
        )


@contextmanager
def named_by(option: str) -> Iterator[None]:
    """Replace the setting in errors by the option that a reward source comes from."""
    setting = "reward.sources"
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith(setting):
            raise
        raise ConfigError(str(error).replace(setting, f"`{option}`", 1), error.code) from error


@contextmanager
def raising(name: str, setting: str) -> Iterator[None]:
    """Turn exceptions of the user's code into a ConfigError that names its line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StrettoError) or is_out_of_memory(error):
            raise
        file = locate(name, setting)["file"] if parts(name) else None
        raise ConfigError(
            f"{setting}: '{name}' raised {describe(error, file)}; fix that, or leave it out",
            "outside-raised",
        ) from error


def member_of(module: ModuleType, place: Mapping[str, str], setting: str) -> Any:
    """Return the member of a module that :func:`locate` found."""
    member = getattr(module, place["function"], None)
    if member is None:
        raise not_defined(place["file"], place["function"], callables(module), setting)
    return member


def _file_of(source: str, module: str, setting: str) -> tuple[Path, str]:
    """Return a module's file and the folder to import it from, without importing anything."""
    name, *inner = module.split(".")
    top = None
    with suppress(ValueError):  # for a module without a spec, as __main__ may be
        top = find_spec(name)  # with all finders, which editable installs add to
    top = spec = top or PathFinder.find_spec(name, [str(Path.cwd())])
    for name in inner:
        spec = PathFinder.find_spec(name, (spec and spec.submodule_search_locations) or [])
    if top is None or spec is None:
        raise ConfigError(
            f"{setting}: '{source}' names the module '{module}', which is not there (looked "
            f"for in what is installed, and in {Path.cwd()}); install it, or name a file as "
            "'file.py:name'",
            "no-reward-module",
        )
    home = top.submodule_search_locations or [top.origin or ""]
    return Path(spec.origin or ""), str(Path(home[0]).parent.resolve())


def import_module(file: str, named: str, root: str, setting: str) -> ModuleType:
    """Import the module ``named`` in the folder ``root``, or a Python file, which may import its
    neighbours and the rest of its package. Raises ConfigError, which names the setting.
    """
    if named:
        sys.path.append(root)
    try:
        return in_this_process(importlib.import_module if named else _load, named or file)
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
    package_name = ".".join(folder.name for folder in reversed(package))
    try:
        importlib.import_module(package_name)
    except Exception:  # any error of its __init__
        with suppress(ImportError):  # for example of a neighbour: the package's error is clearer
            return _load_alone(path)
        raise
    return importlib.import_module(f"{package_name}.{path.stem}")


def _is_package(folder: Path) -> bool:
    return folder.name.isidentifier() and (folder / "__init__.py").is_file()


def _load_alone(path: Path) -> ModuleType:
    # Use the name that others import it by, because processes that are not forked look it up.
    known_as = f"stretto_reward_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(known_as, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def not_defined(file: str, name: str, functions: Collection[str], setting: str) -> ConfigError:
    hint = nearest(name, functions) if functions else "It defines no function."
    return ConfigError(f"{setting}: '{file}' does not define '{name}'. {hint}", "unknown-function")


def in_this_process(call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Return or raise the outcome of a call, in the calling process only.

    The call can run event loops, as in a script, even if the thread is running one.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with ending_forked_children():
            return call(*args, **keywords)
    finally:
        asyncio._set_running_loop(loop)


@contextmanager
def ending_forked_children() -> Iterator[None]:
    """End a forked child like Python, so that it is no second reward process or trainer."""
    pid, raised = os.getpid(), None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        if os.getpid() != pid:
            _end_child(raised)


def _end_child(error: BaseException | None) -> NoReturn:
    """End a forked child like Python, without the exit handlers that its parent registered."""
    status = 1
    try:
        if error is None or (isinstance(error, SystemExit) and error.code is None):
            status = 0
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            status = error.code & 0xFF
        else:
            message = error.code if isinstance(error, SystemExit) else traceback.format_exc()
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def describe(error: BaseException, file: str | None) -> str:
    """Describe an error, with the line of ``file`` (or of any code) that raised it."""
    if isinstance(error, StrettoError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    file_frames = [frame for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and not file_frames:
        return f"{type(error).__name__}: {error}"  # its text names the place
    at = (file_frames or frames)[-1]
    place = f"{Path(at.filename).name}, line {at.lineno}, in {at.name}: {at.line}"
    return f"{type(error).__name__}: {error} ({place})"
