"""TRL's ``checkpoint-N`` folders, and adapter folders in peft's layout."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerState

from stretto import files
from stretto.errors import StateError

STATE, RUN = "run-checkpoint", "run.json"
"""In a ``checkpoint-N`` folder: the run's own checkpoint, and the file that names the run."""


_OF_MODEL = ("config.json", "generation_config.json", "model", "pytorch_model")
"""Prefixes of files that a model has and an adapter lacks."""


def export(
    folder: Path,
    save: Callable[[Path], None],
    own: Path,
    state: TrainerState,
    *,
    adapter: bool,
    limit: int | None,
) -> None:
    """Write ``checkpoint-N``: the model, TRL's state, and hard links to the run's own checkpoint.

    Args:
        save: writes the model.
        own: the run's own checkpoint.
        adapter: whether to put the adapter in place of the merged model.
        limit: how many folders of the run to keep, the newest. ``None`` keeps all.
    """
    run = os.path.relpath(own.parent.parent, folder)  # relative, so that both can be moved together
    with files.explained(folder), files.new_folder(folder) as scratch:
        save(scratch)  # replaces the folder
        if adapter:
            lift_adapter(scratch)
        state.save_to_json(str(scratch / "trainer_state.json"))
        (scratch / RUN).write_text(json.dumps({"run": run, "checkpoint": own.name}))
        _link(own, scratch / STATE)
    exports = [path for path in _exported(folder.parent) if _read(path / RUN).get("run") == run]
    for path in exports[: -limit if limit else 0]:
        shutil.rmtree(path, ignore_errors=True)


def lift_adapter(folder: Path) -> bool:
    """Replace a merged model by its adapter, and move the model to the subfolder ``merged``.
    Returns False without a change if there is no adapter, or its base model has no name.
    """
    adapter, merged = folder / "adapter", folder / "merged"
    adapter_config = _read(adapter / "adapter_config.json")
    if not adapter_config.get("base_model_name_or_path"):
        return False
    merged.mkdir()
    for path in [p for p in folder.iterdir() if p not in (adapter, merged)]:
        path.rename(merged / path.name)
        if not path.name.startswith(_OF_MODEL):  # keep the tokenizer with both
            shutil.copy2(merged / path.name, path)
    for path in adapter.iterdir():
        path.rename(folder / path.name)
    adapter.rmdir()
    return True


def run_of(folder: Path) -> Path:
    """Return the run of a ``checkpoint-N`` folder, and any other folder unchanged."""
    run = Path(os.path.normpath(folder / _read(folder / RUN).get("run", "")))
    if run != Path(os.path.normpath(folder)) and not (run / "config.toml").is_file():
        raise StateError(
            f"'{folder}' belongs to the run in '{run}', which is not there; restore it, or start "
            "from the weights in the checkpoint as model",
            "no-run-of-checkpoint",
        )
    return run


def put_back(folder: Path) -> None:
    """Make a ``checkpoint-N`` folder's checkpoint the newest of its run, and remove later ones,
    because the run repeats those steps. Other folders are left unchanged.
    """
    if origin := _read(folder / RUN):
        target = folder / origin["run"] / "checkpoints" / origin["checkpoint"]
        for path in target.parent.glob("step-*"):
            if path.name > target.name:
                shutil.rmtree(path)
        if not target.exists():
            with files.explained(target), files.new_folder(target) as scratch:
                _link(folder / STATE, scratch)


def _exported(out: Path) -> list[Path]:
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in out.iterdir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def _read(file: Path) -> dict[str, str]:
    """Return a JSON object, empty if the file is missing or invalid."""
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError):
        return {}


def _link(source: Path, target: Path) -> None:
    """Hard-link a folder's files, or copy them on a file system without hard links."""

    def linked(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            shutil.copy2(file, to)

    shutil.copytree(source, target, copy_function=linked, dirs_exist_ok=True)
