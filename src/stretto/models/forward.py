"""Forward passes at sampled tokens, the same for actor, reference and critic.

Shapes: b sequences in a micro-batch, L padded tokens, N sampled tokens of all of them, H hidden.

Sequences are padded on the right: under a causal mask nothing before the padding can see it, so no
attention mask is needed, and the fastest attention kernels apply. If a model's attention reads
where sequences end, they are laid end to end instead, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.models.attention import PACKED, unpacked
from stretto.models.logits import OutputHead
from stretto.models.row_products import RowLinear
from stretto.types import Response, sampled_of


def unwrapped(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT wrapper (its adapters stay active), or itself."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(model, "get_base_model") else model


def text_config(model: nn.Module) -> Any:
    """Return the config of a model's text decoder; one that also takes images keeps it apart."""
    config = unwrapped(model).config
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def headless(model: nn.Module) -> nn.Module:
    """Return a causal LM without its head: all of it that is read before, towers included."""
    lm = unwrapped(model)
    # Some classes, such as Llama4ForCausalLM, name another prefix than the part has.
    inner = lm.base_model if lm.base_model is not lm else getattr(lm, "model", None)
    if inner is None:
        raise ModelError(
            f"{type(lm).__name__} does not say which of its parts is the decoder without the head; "
            "choose a plain causal language model",
            "no-decoder",
        )
    return cast(nn.Module, inner)


def backbone(model: nn.Module) -> nn.Module:
    """Return the text decoder without the head: token ids -> last hidden state (norm applied)."""
    lm = unwrapped(model)
    inner = text_config(lm) is not lm.config
    return cast(nn.Module, lm.get_decoder()) if inner else headless(lm)


def plain_states(decoder: nn.Module, **inputs: Tensor) -> Tensor:
    """Return last hidden states [b, L, H] of rows that are one sequence each, without a cache."""
    with unpacked():
        return cast(Tensor, decoder(**inputs, use_cache=False).last_hidden_state)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the text decoder's layers, in order; none of a model that keeps them in no list."""
    lists = [list(m) for m in backbone(model).children() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def freeze_unread(model: nn.Module) -> None:
    """Freeze what text does not pass through, such as a vision tower: it gets no gradient."""
    if text_config(model) is unwrapped(model).config:
        return
    read = {id(p) for p in backbone(model).parameters()}
    for parameter in headless(model).parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


@torch.no_grad()
def output_head(model: nn.Module) -> OutputHead:
    """Return the head of a causal LM as tensors and factors, if it alone makes the logits."""
    lm = unwrapped(model)
    kind = type(lm).__name__
    linear = lm.get_output_embeddings()
    config = text_config(lm)
    if linear is None or linear.weight.ndim != 2:
        raise ModelError(f"{kind} has no linear output head; use a causal LM", "no-linear-head")
    if hasattr(linear, "base_layer"):
        raise ModelError(
            "model.lora_targets puts an adapter on the output layer, which is not supported; "
            "leave it out, or use 'all-linear'",
            "adapter-on-head",
        )
    bias = getattr(linear, "bias", None)
    plain = OutputHead(linear.weight, bias, by_rows=isinstance(linear, RowLinear))
    head = replace(
        plain,
        scale=float(getattr(config, "logit_scale", None) or 1.0)
        / float(getattr(config, "logits_scaling", None) or 1.0),
        softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )
    ids = torch.arange(8, device=head.weight.device).remainder(head.weight.shape[0])[None]
    hidden = plain_states(backbone(lm), input_ids=ids)
    with unpacked():
        theirs = lm(input_ids=ids, use_cache=False).logits.float()
    for candidate in (head, plain):  # Aya Vision leaves out what its decoder's config says
        worst = (candidate.logits(hidden) - theirs).abs().max().item()
        if worst <= 0.02 * theirs.abs().max().item() + 1e-4:
            return candidate
    raise ModelError(
        f"{kind} does something to its logits besides its output layer (they differ by "
        f"{worst:.3g}); Stretto computes logits at response positions only and cannot use it. "
        "Choose a model with a plain, scaled or soft-capped linear head",
        "no-linear-head",
    )


def head_reader(model: nn.Module) -> Callable[[], OutputHead]:
    """Return a function that reads :func:`output_head` with the weights of the moment, such as
    gathered shards. The head is checked once.
    """
    template = replace(output_head(model), weight=torch.empty(0, 0), bias=None)
    linear = unwrapped(model).get_output_embeddings()
    return lambda: replace(template, weight=linear.weight, bias=getattr(linear, "bias", None))


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return token ids [b, L], padded with 0 after each row's end."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


@dataclass(frozen=True, slots=True)
class Packing:
    """How sequences of padded rows [b, L] are laid end to end: M tokens."""

    kept: Tensor  # [M], the places of tokens among all b * L
    positions: Tensor  # [M], in their sequences
    ends: Tensor  # [b + 1] of int32: 0, and where each sequence ends
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], width: int) -> Self:
        """Lay out rows of a width with so many tokens each; on the CPU."""
        sizes = torch.tensor(lengths)
        places = (torch.arange(width) < sizes[:, None]).flatten().nonzero()[:, 0]
        ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
        return cls(places, places % width, ends, max(lengths))

    def to(self, device: torch.device) -> Self:
        places, positions, ends = (t.to(device) for t in (self.kept, self.positions, self.ends))
        return replace(self, kept=places, positions=positions, ends=ends)

    def states(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return last hidden states [M, H] of padded tokens [b, L]."""
        out = backbone(model)(
            input_ids=tokens.flatten()[self.kept][None],
            position_ids=self.positions[None],
            use_cache=False,
            cu_seq_lens_q=self.ends,
            max_length_q=self.longest,
        )
        return cast(Tensor, out.last_hidden_state[0])


def packs(model: nn.Module) -> bool:
    return bool(text_config(model)._attn_implementation == PACKED)


@torch.no_grad()
def packs_rightly(model: nn.Module) -> bool:
    """Return whether sequences end to end give a model's states as padded ones do, to rounding.

    Convolutions and the like may read on from one sequence into the next, and some families have an
    attention that torch's kernel does not compute.
    """
    rows, plain = [[3, 4, 5, 6, 7], [5, 3, 4]], cast(Any, unwrapped(model))
    ids = pad_right(rows, next(model.parameters()).device)
    packing = Packing.of([len(row) for row in rows], ids.shape[1]).to(ids.device)
    plain.set_attn_implementation("eager")
    padded = plain_states(backbone(model), input_ids=ids).flatten(0, 1)
    plain.set_attn_implementation(PACKED)
    try:
        packed = packing.states(model, ids)
    except (ValueError, RuntimeError):
        return False
    worst = (packed - padded[packing.kept]).abs().max().item()
    return bool(worst <= 0.02 * padded.abs().max().item() + 1e-4)


def hidden_states(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return last hidden states [b, L, H] of rows; entries past a row's end are garbage."""
    ids = pad_right(rows, next(model.parameters()).device)
    if not packs(model):
        return plain_states(backbone(model), input_ids=ids)
    packing = Packing.of([len(row) for row in rows], ids.shape[1]).to(ids.device)
    flat = packing.states(model, ids)
    padded = flat.new_zeros(ids.numel(), flat.shape[1]).index_copy(0, packing.kept, flat)
    return padded.view(*ids.shape, -1)


def predicting(learned: npt.ArrayLike, before: int = 0) -> list[int]:
    """Return the places of the states that predict learned tokens, and whose values are V(s_t).

    ``learned`` has one bool for each token in a part of a sequence that follows ``before`` tokens.
    """
    places: list[int] = (np.flatnonzero(learned) + (before - 1)).tolist()
    return places


def predicting_response(response: Response) -> list[int]:
    """Return the places, in prompt and response, of the states that predict sampled tokens."""
    return predicting(sampled_of(response), len(response.prompt.tokens))


def inputs(responses: Sequence[Response]) -> list[list[int]]:
    """Return the tokens that a pass reads: all but each last one, which predicts nothing."""
    return [[*r.prompt.tokens, *r.tokens[:-1].tolist()] for r in responses]


def flat_places(places: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return places [N] in rows of a width, one row after another, on the CPU."""
    flat = [row * width + at for row, row_places in enumerate(places) for at in row_places]
    return torch.tensor(flat, dtype=torch.long)


def states_at(hidden: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Pick states [N, H] out of [b, L, H]: those of the first row's places, then the next row's."""
    return hidden.flatten(0, 1)[flat_places(places, hidden.shape[1]).to(hidden.device)]


def response_hidden(model: nn.Module, responses: Sequence[Response]) -> Tensor:
    """Return hidden states [N, H] that predict the sampled tokens, one response after another."""
    hidden = hidden_states(model, inputs(responses))
    return states_at(hidden, [predicting_response(r) for r in responses])


def response_tokens(responses: Sequence[Response], device: torch.device) -> Tensor:
    """Return sampled tokens [N] of all responses, one after another."""
    tokens = torch.from_numpy(np.concatenate([r.tokens[sampled_of(r)] for r in responses]))
    return tokens.to(device, torch.long)


def last_hidden(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return hidden states [b, H] at the last token of each row."""
    hidden = hidden_states(model, rows)
    return torch.stack([h[len(row) - 1] for h, row in zip(hidden, rows, strict=True)])


def by_token_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``budget`` tokens, padding counted.

    Neighbours in length go together; a sequence longer than the budget goes alone. Returns indices
    into ``lengths``, longest sequences first.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def microbatches(responses: Sequence[Response], budget: int) -> Iterable[list[int]]:
    return by_token_budget([r.total_tokens for r in responses], budget)


_FOLLOWING = ("longrope", "dynamic")


def positions(model: nn.Module, *, generating: bool = False) -> int | None:
    """Return the most tokens of a sequence, if limited; ``generating``: of one over a cache."""
    config, limits = text_config(model), []
    if (limit := getattr(config, "max_position_embeddings", None)) and limit > 0:
        limits.append(limit)
    for name, table in model.named_modules():
        # RoBERTa's kind counts positions from behind the padding token's id.
        is_table = isinstance(table, nn.Embedding) and name.endswith("position_embeddings")
        if is_table and table.padding_idx is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    if generating:  # beyond these the frequencies follow the longest sequence in the batch
        following = (rope for rope in _ropes(config) if rope.get("rope_type") in _FOLLOWING)
        limits += filter(None, (r.get("original_max_position_embeddings") for r in following))
        if getattr(config, "attn_temperature_tuning", False):  # Llama 4 reads it off the cache
            limits.append(config.floor_scale - 1)
    return min(map(int, limits), default=None)


def following_frequencies(config: Any) -> str:
    """Return the kind of frequencies that follow a batch's longest sequence; empty for none."""
    kinds = (str(rope.get("rope_type")) for rope in _ropes(config))
    return next((kind for kind in kinds if kind in _FOLLOWING), "")


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    yield rope
    yield from (part for part in rope.values() if isinstance(part, Mapping))
