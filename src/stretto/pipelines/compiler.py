"""The compiler of the loops over tasks, which the extra ``pipelines`` brings."""

from __future__ import annotations

from stretto.errors import MissingExtraError

try:
    from numba import njit
except ImportError as error:
    raise MissingExtraError("numba", "pipelines", "planning of fused pipelines") from error

__all__ = ["njit"]
