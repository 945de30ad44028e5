"""torch, loaded at its first use.

The settings read the algorithms' descriptions, and must start without torch. So the files of this
package take ``torch`` from here, and import types of annotations under ``TYPE_CHECKING``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _Torch()
