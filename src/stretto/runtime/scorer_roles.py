"""Services of model scorers in other processes, with weights of their own or the learner's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from stretto.assembly.parts import open_prompts
from stretto.assembly.roles import RoleFactory, load_reward
from stretto.assembly.run_models import (
    load_teacher,
    made_ready,
    make_critic,
    starts_adapted,
    with_adapters,
)
from stretto.config.sections import reward_source
from stretto.errors import ModelError
from stretto.layout import UNCUTTABLE, Layout
from stretto.models.layer_shards import GatheredPasses, frozen_shards
from stretto.models.lora import ReferenceAdapters, starting_policy
from stretto.models.weights import fingerprint
from stretto.runtime.process_messages import SENDER, TRAINED, RoleSetup, frozen_mark
from stretto.runtime.role_services import ScorerService, cut, follow, loaded_actor, starting_actor
from stretto.saying import silent
from stretto.training.sharded import ShardedModel
from stretto.training.trained import TrainedModel
from stretto.types import Prompt
from stretto.weights.channel import OwnWeights


def reference(setup: RoleSetup) -> ScorerService:
    """Make the reference's service. It scores with the initial actor, or, if a learner in the same
    process trains adapters, with its actor without them.
    """
    setup.prepare()
    config = setup.config
    overrides = setup.overrides
    notes = list[str]()
    keeps_adapters = overrides.reference is None and starts_adapted(config.model, overrides.actor)
    actor = _learners(setup, "reference") if overrides.reference is None else None
    factory = RoleFactory(config, notes.append)
    if isinstance(actor, ShardedModel):  # shares its shards, but for the adapters
        adapters = ReferenceAdapters(actor.model, starts_adapted=keeps_adapters)
        passes = GatheredPasses(actor.grid, actor.compute, adapters)
        (scorer,) = factory.model_scorers(actor.model, None, None, passes)
        marks = actor.frozen_fingerprint(), ""
        return ScorerService(scorer, notes=notes, marks=marks, give_back=setup.give_back)
    if overrides.reference is not None:
        model = made_ready(overrides.reference, config.model.device, "the reference")
        model.requires_grad_(False)
    elif actor is not None:
        model = actor.model
    else:
        model, _ = loaded_actor(setup)
    # Adapters start at random, so with them only the frozen weights are compared.
    all_trainable = all(p.requires_grad for p in model.parameters())
    marks = frozen_mark(model), fingerprint(model.named_parameters()) if all_trainable else ""
    if keeps_adapters:
        model = starting_policy(model)
    elif actor is None and hasattr(model, "peft_config"):
        model = cast(Any, model).unload()
    gathered = _divided(model, setup, setup.layout, "reference", notes)
    (scorer,) = factory.model_scorers(model, None, None, gathered)
    moves = actor is None and gathered is None
    offloaded = setup.offloaded("reference", scorer.model.parameters) if moves else None
    return ScorerService(
        scorer, notes=notes, marks=marks, offloaded=offloaded, give_back=setup.give_back
    )


def critic(setup: RoleSetup) -> ScorerService:
    """Make the service of the critic as a scorer in its process. It is the learner's own, if it can
    be (:meth:`~stretto.config.Config.uses_learner`), and all followers are there, its layout is
    given, or slices do not divide it.
    """
    setup.prepare()
    config, notes = setup.config, list[str]()
    factory = RoleFactory(config, notes.append)
    trained = _learners(setup, "critic")
    shards = trained if isinstance(trained, ShardedModel) else None
    if shards and (setup.shares_weights or setup.layout):
        return _learners_critic(shards, setup, factory, notes)
    model = _critic(setup.for_loading())
    try:
        receiver = follow(model, setup)
    except ModelError as error:
        if error.code not in UNCUTTABLE:
            raise
        if shards:
            return _learners_critic(shards, setup, factory, notes)
        reason = str(error).partition("; ")[0]
        raise ModelError(
            "the critic as a scorer has slices of its own, because it may lag behind the learner's "
            f"or has other ranks, and {reason}. Give it slices alone, in a number that divides "
            "its heads, or place it in the learner's ranks with schedule.lag = 0: then it uses the "
            "learner's shards",
            error.code,
        ) from error
    (scorer,) = factory.model_scorers(None, model, receiver)
    offloaded = setup.offloaded("critic", model.parameters)
    give_back = setup.give_back
    return ScorerService(scorer, receiver, notes, offloaded=offloaded, give_back=give_back)


def _learners_critic(
    trained: ShardedModel, setup: RoleSetup, factory: RoleFactory, notes: list[str]
) -> ScorerService:
    channel = OwnWeights(setup.shared[SENDER], trained.fingerprint)
    gathered = GatheredPasses(trained.grid, trained.compute)
    (scorer,) = factory.model_scorers(None, trained.model, channel, gathered)
    return ScorerService(scorer, notes=notes, give_back=setup.give_back)


def reward_model(setup: RoleSetup, source: str, prompts: Sequence[Prompt]) -> ScorerService:
    """Make the service of a reward model in its process, and check it on these prompts."""
    setup.prepare()
    config = setup.config
    overrides = setup.overrides
    notes = list[str]()
    loading_setup = setup.for_loading()
    tokenizer = open_prompts(config, overrides, silent).tokenizer
    model = (config if source in overrides.reward_models else loading_setup.config).model
    loaded = load_reward(reward_source(source), model, loading_setup.overrides, notes.append)
    assert loaded is not None
    gathered = _divided(loaded[0], setup, setup.layout, source, notes)
    factory = RoleFactory(config, notes.append)
    slots = factory.scorer_slots(loaded[0], source, gathered)
    scorer = factory.reward_scorer(source, tokenizer, loaded, slots=slots, gathered=gathered)
    factory.check_rewards([scorer], prompts)
    offloaded = None if gathered else setup.offloaded(source, scorer.model.parameters)
    return ScorerService(scorer, notes=notes, offloaded=offloaded, give_back=setup.give_back)


def teacher(setup: RoleSetup, name: str, prompts: Sequence[Prompt]) -> ScorerService:
    """Make the service of a teacher in its process, and check it on these prompts."""
    setup.prepare()
    config, notes = setup.config, list[str]()
    factory, loading = RoleFactory(config, notes.append), setup.for_loading()
    tokenizer = open_prompts(config, setup.overrides, silent).tokenizer
    in_files = loading.overrides.in_files
    loaded = load_teacher(loading.config, name, tokenizer, notes.append, in_files=in_files)
    gathered = _divided(loaded[0], setup, setup.layout, name, notes)
    scorer = factory.teacher_scorer(name, loaded, tokenizer, prompts, gathered)
    offloaded = None if gathered else setup.offloaded(name, scorer.model.parameters)
    return ScorerService(scorer, notes=notes, offloaded=offloaded, give_back=setup.give_back)


def _divided(
    model: nn.Module, setup: RoleSetup, layout: Layout | None, name: str, notes: list[str]
) -> GatheredPasses | None:
    """Divide a frozen model among the ranks, by a layout or, without one, into slices if possible,
    else into shards. Return the passes of shards. They are offloaded by leaving them on the host.
    """
    if layout is None or not layout.gathers:
        try:
            cut(model, setup)
        except ModelError as error:
            if layout or error.code not in UNCUTTABLE:
                raise
            reason = str(error).partition("; ")[0]
            layout = Layout.sharded(dist.get_world_size())
            notes.append(
                f"'{name}' is sharded over {layout.ranks} ranks, because it cannot be sliced: "
                f"{reason}"
            )
        else:
            return None
    return frozen_shards(model, setup.grid(layout), on_host=setup.offload)


def _learners(setup: RoleSetup, scorer: str) -> TrainedModel | None:
    """Return the learner's model in these ranks that a scorer uses, if any."""
    model = setup.shared.get(TRAINED, {}).get("actor" if scorer == "reference" else scorer)
    uses = setup.config.uses_learner(scorer, setup.layout)
    return model if uses and isinstance(model, TrainedModel) else None


def _critic(setup: RoleSetup) -> nn.Module:
    config, overrides = setup.config, setup.overrides
    actor, prompts = starting_actor(setup)
    tokenizer, m = prompts.tokenizer, config.model
    rewards = RoleFactory(config, silent).critic_rewards(tokenizer, overrides)
    model = make_critic(m, config.critic.init, actor, tokenizer, rewards, overrides, silent)
    return with_adapters(model, m, config.seed, "SEQ_CLS", None)
