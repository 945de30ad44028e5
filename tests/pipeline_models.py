"""Small models of several architectures, for pipeline tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_workers import Batch, Trainer, lm_loss, value_loss
from rank_helpers import call_each
from stretto.models.forward import backbone, output_head
from stretto.models.heads import critic_from_actor
from stretto.models.tensor_parallel import Cuts, plan_cuts
from stretto.pipelines.executor.stages import NAMES, Stage, StageLayout, StageOwners, cut
from stretto.workers.group import RankGroup

VOCABULARY = 53
RAGGED = [(9, 4, 7), (12,), (3, 3, 2, 5), (6, 11)]


def language_model(kind: str, *, layers: int = 4, tied: bool = True, **settings: Any) -> Any:
    """A small causal language model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, **settings}
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def critic_of(actor: Any) -> Any:
    critic: Any = critic_from_actor(actor)
    nn.init.normal_(critic.score.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    return critic


def make_batches(shapes: Sequence[Sequence[int]], seed: int) -> list[Batch]:
    """Micro-batches with rows of the given lengths, padded with noise: nothing may depend on it."""
    rng = torch.Generator().manual_seed(seed)
    return [
        Batch(torch.randint(VOCABULARY, (len(rows), max(rows)), generator=rng), tuple(rows))
        for rows in shapes
    ]


def serial_gradients(model: Any, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Of the whole model in this process, micro-batch after micro-batch."""
    model.zero_grad()
    for batch in batches:
        hidden = backbone(model)(input_ids=batch.tokens, use_cache=False).last_hidden_state
        is_critic = model.get_output_embeddings() is None
        loss = (
            value_loss(model, hidden, batch)
            if is_critic
            else lm_loss(output_head(model), hidden, batch)
        )
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def load_stages(ranks: RankGroup, layout: StageLayout, actor: Any, critic: Any) -> None:
    """Give the ranks of trainers their stages of two models, which they slice."""
    models = dict(zip(NAMES, (actor, critic), strict=True))
    of_actor, of_critic = (plan_cuts(models[name], layout.tp(name)) for name in NAMES)
    owners = tuple(StageOwners.of(models[name], name, layout) for name in NAMES)
    stages = list[tuple[Stage, Stage, StageLayout, tuple[Cuts, Cuts], tuple[StageOwners, ...]]]()
    for rank in range(layout.ranks):
        first, second = (
            cut(models[name], layout.of(name)[0], layout.place(name, rank)[1]) for name in NAMES
        )
        stages.append((first, second, layout, (of_actor, of_critic), owners))
    call_each(ranks, Trainer.load, stages)
