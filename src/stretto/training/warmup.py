"""A short supervised warm-up on the task's reference answers, for models trained from scratch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from stretto import files
from stretto.config import TrainingConfig
from stretto.config.training_config import token_budget
from stretto.errors import ConfigError, StateError
from stretto.models.backend import backend_of
from stretto.models.devices import Backend
from stretto.models.forward import microbatches, output_head, response_hidden, response_tokens
from stretto.models.logits import token_logprobs
from stretto.saying import Advance, unseen
from stretto.training.trained import LearningRate, TrainedModel
from stretto.types import Response

BATCH = 32
"""Examples per update."""

SMALL = 10**10
"""Limit of tokens times weights for a batch in one pass: under a second, and little memory."""

_WEIGHT, _RANDOM = "weight ", "random "


def warm_up(
    model: nn.Module,
    examples: Sequence[Response],
    lr: float,
    optimizer: TrainingConfig,
    advance: Advance = unseen,
) -> float:
    """Run one epoch of cross-entropy over the examples' response tokens, in batches of
    :data:`BATCH`. Trains the model in place. Responses are the references, including the
    end-of-sequence token. Calls ``advance`` with the size of each batch done. Returns the last
    batch's loss, in nats per token.
    """
    batches = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    training = optimizer.model_copy(update={"lr_schedule": "cosine"})
    trained = TrainedModel(model, LearningRate(lr, len(batches)), training)
    head = output_head(model)
    budget = token_budget(optimizer.microbatch_tokens, next(model.parameters()).device)
    weights = sum(p.numel() for p in model.parameters())
    loss = 0.0
    for batch in batches:
        loss, count = 0.0, sum(len(example) for example in batch)
        with trained.training():
            padded = len(batch) * max(example.total_tokens for example in batch)
            for rows in microbatches(batch, budget if padded * weights > SMALL else padded):
                part = [batch[i] for i in sorted(rows)]
                hidden = response_hidden(model, part)
                logprobs, _ = token_logprobs(head, hidden, response_tokens(part, hidden.device))
                share = -logprobs.sum() / count
                share.backward()
                loss += share.item()
        trained.update()
        advance(len(batch))
    trained.close()
    return loss


def keep(model: nn.Module, loss: float, key: str, file: Path) -> None:
    """Write a warmed-up model, its loss and torch's random states, so that a run continues bit for
    bit. The key identifies this warm-up.
    """
    tensors = {f"{_WEIGHT}{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"{_RANDOM}{name}": s for name, s in _backend(model).random_states().items()}
    about = {"key": key, "loss": repr(loss), "sha256": _sha256(tensors)}
    files.write_whole(file, save(tensors, about))


@torch.no_grad()
def take(model: nn.Module, key: str | None, file: Path) -> float:
    """Load a file of :func:`keep` into a model and return the loss. Raises ConfigError if ``key``
    is given and the file's differs, StateError if the file is damaged.
    """
    try:
        with safe_open(file, "pt") as handle:
            about = handle.metadata() or {}
            if key is not None and about.get("key") != key:
                raise ConfigError(
                    f"'{file}' holds the warm-up of another model, of other examples or of other "
                    "settings; remove it, or name another file",
                    "other-warmup",
                )
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            if about.get("sha256", sha256 := _sha256(tensors)) != sha256:
                raise StateError(
                    f"'{file}' is damaged: its SHA-256 is another one than when it was written; "
                    "remove it, and the warm-up is repeated",
                    "damaged-file",
                )
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[f"{_WEIGHT}{name}"])
            random = (name for name in tensors if name.startswith(_RANDOM))
            _backend(model).set_random_states({n.removeprefix(_RANDOM): tensors[n] for n in random})
            return float(about["loss"])
    except (SafetensorError, OSError, KeyError) as error:
        raise StateError(f"'{file}' is damaged: {error}; remove it", "damaged-file") from error


def _sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        content = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        digest.update(content.cpu().numpy().data)
    return digest.hexdigest()


def _backend(model: nn.Module) -> Backend:
    return backend_of(next(model.parameters()).device)
