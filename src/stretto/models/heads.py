"""Models with a scalar head, critics and reward models: sequence classifiers with one label."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from stretto.errors import ModelError, first_line
from stretto.models.forward import headless, unwrapped
from stretto.models.info import language_auto
from stretto.models.mapped import copied, final_dtype
from stretto.models.weights import with_own_structure

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HEAD_NAMES = ("score", "classifier")
"""Names of the head's linear layer in transformers."""


def scalar_head(model: nn.Module) -> nn.Module:
    """Return the linear layer [H] -> [1] of a sequence classifier. ModelError without one."""
    classifier = unwrapped(model)
    for name in HEAD_NAMES:
        head = getattr(classifier, name, None)
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor):
            if weight.shape[0] != 1:
                raise ModelError(
                    f"{type(classifier).__name__} has {weight.shape[0]} outputs; a reward model or "
                    "critic has one. Load it with num_labels=1, or train a scalar head",
                    "several-scores",
                )
            return cast(nn.Module, head)
    raise ModelError(
        f"{type(classifier).__name__} has no layer called {' or '.join(HEAD_NAMES)}; use a "
        "sequence-classification checkpoint with one label",
        "no-scalar-head",
    )


def apply_scalar_head(model: nn.Module, hidden: Tensor) -> Tensor:
    """Apply the head to hidden states, [..., H] -> [...], in float32."""
    head: Any = scalar_head(model)
    trained = head.modules_to_save["default"] if hasattr(head, "modules_to_save") else head
    bias = getattr(head, "bias", None)
    values: Tensor = hidden.float() @ trained.weight.float()[0]
    return values if bias is None else values + cast(Tensor, bias).float()[0]


def critic_from_actor(actor: nn.Module, *, shares: bool = False) -> nn.Module:
    """Return a sequence classifier with the actor's backbone and a zero head. The backbone is a
    copy. If it ``shares``, it has its own modules over the same weights, so that adapters train it
    without changing them.
    """
    lm = unwrapped(actor)
    actor_body = headless(lm)
    body = with_own_structure(actor_body) if shares else copied(actor_body)
    return _classifier(lm, body, "name a scalar model in critic.init")


def reward_model_from(lm: nn.Module, seed: int) -> nn.Module:
    """Return a sequence classifier on a language model's backbone. The head starts from N(0, 1 / (H
    + 1)), as in Stiennon et al. (2020), because no gradient would reach the backbone through a zero
    head at first.
    """
    model = _classifier(lm, headless(lm), "choose another model.name")
    weight: Any = scalar_head(model).weight
    fresh = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        weight.copy_(fresh / (weight.shape[1] + 1) ** 0.5)
    return model


def _classifier(lm: Any, body: nn.Module, remedy: str) -> nn.Module:
    """Return a classifier with a zero head. ModelError if there is no code for its class."""
    from transformers import AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(lm.config)
    config.num_labels = 1
    vars(config).pop("quantization_config", None)  # only its body is in 4 bits
    register_classifier(type(config))
    auto_class: Any = AutoModelForSequenceClassification
    try:
        with no_init_weights():
            classifier = auto_class.from_config(config, dtype=final_dtype(next(lm.parameters())))
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{type(lm).__name__} gives no sequence classifier, of which a critic or a reward "
            f"model could be made: {first_line(error)}. A model with its own code must bring one; "
            f"else {remedy}",
            "no-classifier",
        ) from error
    setattr(classifier, classifier.base_model_prefix, body)
    model: nn.Module = classifier.to(lm.device).eval()
    with torch.no_grad():
        for parameter in scalar_head(model).parameters():
            parameter.zero_()
    return model


def register_classifier(kind: type[PreTrainedConfig]) -> None:
    """Register a sequence classifier with transformers for a config class. Uses transformers' own
    class if there is one. Otherwise makes one like most of transformers' own: a linear layer
    ``score`` on the last hidden state of ``AutoModel``.
    """
    from transformers import AutoModelForSequenceClassification as Auto
    from transformers.modeling_layers import GenericForSequenceClassification

    auto = language_auto(kind)
    if kind in Auto._model_mapping or auto is None:
        return
    lm = auto._model_mapping[kind]
    base = next(c for c in lm.__mro__ if c.__name__.endswith("PreTrainedModel"))
    namespace = {
        "config_class": kind,
        "__module__": lm.__module__,  # transformers inspects its source for features
        "__reduce__": lambda self: (_empty_classifier, (kind,), vars(self)),
    }
    name = f"{kind.__name__.removesuffix('Config')}ForSequenceClassification"
    classifier: Any = type(name, (GenericForSequenceClassification, base), namespace)
    if not hasattr(kind, "pad_token_id"):  # read by its forward, missing for CodeGen
        setattr(kind, "pad_token_id", None)  # noqa: B010
    # In 5.17 Auto.register() ignores config classes that belong to transformers itself.
    Auto._model_mapping._extra_content[kind] = classifier


def _empty_classifier(kind: type[PreTrainedConfig]) -> PreTrainedModel:
    """Return an object for unpickling to fill, because pickle finds the class in no module."""
    from transformers import AutoModelForSequenceClassification as Auto

    register_classifier(kind)
    classifier: Any = Auto._model_mapping[kind]
    empty: PreTrainedModel = classifier.__new__(classifier)
    return empty


def set_padding(model: nn.Module, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> bool:
    """Give a sequence classifier and its tokenizer a padding token that ends no response.
    transformers reads a classifier at the last token that is not padding. Keeps the tokenizer's own
    padding token unless it is in ``ends``. Otherwise takes the first special token that neither
    ends nor begins a text. Without one, transformers refuses batches.
    """
    end_ids = {*ends, tokenizer.eos_token_id}
    current: Any = tokenizer.pad_token_id
    special = sorted(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)
    spares = [i for i in special if i not in {*end_ids, tokenizer.bos_token_id}]
    pad = current if current is not None and current not in end_ids else next(iter(spares), None)
    config = unwrapped(model).config
    config.pad_token_id = config.get_text_config().pad_token_id = pad
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    return pad is not None
