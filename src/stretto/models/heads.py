"""Models with a scalar head: critics and reward models.

Both are sequence-classification checkpoints with one label, so that either can start from the
other and transformers loads what Stretto saves.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.models.forward import unwrapped

HEAD_NAMES = ("score", "classifier")
"""What transformers calls the linear layer of a sequence classifier."""


def scalar_head(model: nn.Module) -> nn.Module:
    """The linear layer [H] -> [1] of a sequence classifier.

    Raises:
        ModelError: there is none, or it has another number of outputs.
    """
    classifier = unwrapped(model)
    for name in HEAD_NAMES:
        head = getattr(classifier, name, None)
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor):
            if weight.shape[0] != 1:
                raise ModelError(
                    f"{type(classifier).__name__} has {weight.shape[0]} outputs; a reward model or "
                    "critic has one. Load it with num_labels=1, or train a scalar head"
                )
            return cast(nn.Module, head)
    raise ModelError(
        f"{type(classifier).__name__} has no layer called {' or '.join(HEAD_NAMES)}; use a "
        "sequence-classification checkpoint with one label"
    )


def apply_scalar_head(model: nn.Module, hidden: Tensor) -> Tensor:
    """The head's output for hidden states [..., H] -> [...], in float32."""
    head: Any = scalar_head(model)
    weight = (
        head.modules_to_save["default"].weight if hasattr(head, "modules_to_save") else head.weight
    )
    bias = getattr(head, "bias", None)
    values: Tensor = hidden.float() @ weight.float()[0]
    return values if bias is None else values + cast(Tensor, bias).float()[0]


@torch.no_grad()
def zero_scalar_head(model: nn.Module) -> None:
    """Make every output 0: the best constant guess, and where an untrained critic starts."""
    for parameter in scalar_head(model).parameters():
        parameter.zero_()


def critic_from_actor(actor: nn.Module) -> nn.Module:
    """A sequence classifier with a copy of the actor's backbone and a zero head.

    Raises:
        ModelError: transformers has no sequence classifier for this architecture.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    lm = unwrapped(actor)
    config = copy.deepcopy(lm.config)
    config.num_labels = 1
    auto_class: Any = AutoModelForSequenceClassification
    try:
        with no_init_weights():
            critic = auto_class.from_config(config, dtype=lm.dtype)
    except ValueError as error:
        raise ModelError(
            f"there is no sequence classifier for {type(lm).__name__}, so no critic can be made "
            "from the actor; name a scalar model of another architecture in critic.init"
        ) from error
    setattr(critic, critic.base_model_prefix, copy.deepcopy(lm.base_model))
    zero_scalar_head(critic)
    return cast(nn.Module, critic.to(lm.device).eval())
