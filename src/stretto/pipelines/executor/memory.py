"""Memory that a stage keeps of a micro-batch for its backward pass."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stretto.pipelines.executor.stages import Stage


def saved_bytes(stage: Stage, tokens: Tensor) -> int:
    """Bytes that autograd saves in a forward pass, in the mode that the stage is in.

    A checkpointed layer saves its input alone.

    Memory that several tensors share counts once, parameters and buffers not at all.

    Args:
        stage: runs once; no gradient is made.
        tokens: ids [b, L]; stages after the first get noise of the same shape.
    """
    weight = next(stage.parameters())
    x = tokens
    if not stage.first:
        shape = (*tokens.shape, stage.hidden_size)
        x = torch.randn(shape, device=weight.device).to(stage.dtype).requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in chain(stage.parameters(), stage.buffers())}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # While the output lives, so does all that was saved, and no two have one address.
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(x)
    del output
    return sum(saved.values())
