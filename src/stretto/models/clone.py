"""Second bodies of a model: for use in another thread, and for generation while it is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def with_own_structure(model: M) -> M:
    """Make another tree of modules over the very same parameters and buffers.

    What is changed on a module (its mode, a forward pass put in place of its own, whether adapters
    are on) is then seen by one of the two only, so that each can be used in a thread of its own.
    Weights are never seen apart: an update of one is an update of the other.

    Args:
        model: at rest: what is changed on its modules at this moment is copied along.
    """
    return _copied(model, chain(model.parameters(), model.buffers()))


def with_own_weights(model: M) -> M:
    """A copy for inference alone, whose weights change only when they are loaded.

    Trained weights and buffers are copied and take no gradients; tied weights stay tied. Frozen
    weights, those below LoRA adapters for one, never change and are shared. Parameters have the
    names that they have in ``model``.

    Args:
        model: at rest, as above; its parameters say by ``requires_grad`` which of them are trained.
    """
    clone = _copied(model, (p for p in model.parameters() if not p.requires_grad))
    return clone.requires_grad_(False)


def _copied(model: M, shared: Iterable[Tensor]) -> M:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared}).eval()
