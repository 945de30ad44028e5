"""A channel between processes of one machine: files in a folder, in memory where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from stretto.errors import EngineError
from stretto.files import write_whole
from stretto.types import WeightsRef


class DiskChannel:
    """A channel of a file for each version of each model; all sides name the same folder.

    A version is removed once ``keep`` later ones of its model are there: by then nobody loads it.

    Args:
        folder: an existing one, private to the run.
        keep: versions of each model that stay.
    """

    name = "disk"

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder, self._keep = folder, keep

    def put(self, ref: WeightsRef, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors to a file; see :class:`~stretto.weights.channel.WeightChannel`."""
        on_cpu = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        write_whole(self._file(ref), save(on_cpu))
        files = sorted(self._folder.glob(f"{ref.model}-*.safetensors"))
        for old in files[: -self._keep]:
            old.unlink()

    def get(self, ref: WeightsRef) -> Mapping[str, Tensor]:
        """Read the tensors of a file; see :class:`~stretto.weights.channel.WeightChannel`."""
        try:
            return load_file(self._file(ref))
        except FileNotFoundError as error:
            raise EngineError(
                f"version {ref.version} of the {ref.model} is not in '{self._folder}' any more"
            ) from error

    def _file(self, ref: WeightsRef) -> Path:
        return self._folder / f"{ref.model}-{ref.version:09d}.safetensors"
