"""Learners over ranks that hold shards, in the ranks of tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from helpers import VOCABULARY, critic_of, llama
from mapped_workers import held_bytes
from stretto.config import Config, ModelConfig
from stretto.errors import LearnerError
from stretto.layout import Layout
from stretto.models.devices import Backend
from stretto.models.layer_shards import GatheredPasses, Grid, frozen_shards
from stretto.models.load import set_checkpointing
from stretto.models.lora import ReferenceAdapters, add_lora
from stretto.models.tiny import byte_tokenizer
from stretto.scoring.base_scorer import ModelScorer
from stretto.scoring.model_scorers import RewardModelScorer, critic_scorer, reference_scorer
from stretto.training import shard_files, sharded
from stretto.training.learner import PolicyLearner
from stretto.training.losses import Losses
from stretto.training.sharded import ShardedBackprop, ShardedModel
from stretto.training.trained import LearningRate
from stretto.types import Response, Score, TrainBatch

UPDATES = 10


def models(kind: str) -> tuple[Any, Any]:
    """An actor and a critic, the same on every rank."""
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    dtype = dtypes.get(kind.split()[0], torch.float64)
    actor = qwen(dtype) if kind == "norms of heads" else llama(dtype=dtype, tied=kind != "untied")
    critic = critic_of(actor)
    if kind.endswith(("lora", "dora")):
        lora = ModelConfig(lora_rank=2, lora_kind="dora" if kind == "dora" else "lora")
        return add_lora(actor, lora, "CAUSAL_LM"), add_lora(critic, lora, "SEQ_CLS")
    if kind == "partly frozen":
        actor.model.embed_tokens.requires_grad_(False)
        actor.model.layers[0].requires_grad_(False)
    if kind == "checkpointing":
        for model in (actor, critic):
            set_checkpointing(model, ModelConfig(gradient_checkpointing="on"))
            model.eval()
    return actor, critic


def qwen(dtype: torch.dtype = torch.float32) -> Any:
    """A model that normalises the queries and keys of each head, and shares keys among heads."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        attention_bias=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    return model.to(dtype)


def first_gradients(learner: PolicyLearner, before: str, batch: TrainBatch) -> dict[str, Any]:
    """Gradients as they are when a method of the actor's trained model is called."""
    actor: Any = learner.trained["actor"]
    method, found = getattr(actor, before), {}

    def keep(*args: Any, **options: Any) -> float:
        own = {key: gradient.clone() for key, gradient in actor.gradients().items()}
        found.update(actor.gathered(own))
        return float(method(*args, **options))

    setattr(actor, before, keep)
    learner.train(batch)
    return found


def scorers_of(
    budget: int, divided: Callable[[nn.Module], GatheredPasses | None] = lambda _: None
) -> list[ModelScorer]:
    """A reference and a reward model, the same on each rank."""
    actor, classifier = (model.float() for model in models("plain"))
    tokenizer = byte_tokenizer()
    gathered = divided(classifier)
    return [
        reference_scorer(actor, 0.7, budget, divided(actor)),
        RewardModelScorer("rm", classifier, tokenizer, tokenizer, budget, gathered=gathered),
    ]


def scored(scorer: ModelScorer, responses: Sequence[Response]) -> list[Score]:
    scorer.admit(responses)
    return scorer.finish([response.id for response in responses])


class ShardedRank:
    """A rank that makes one learner after the other."""

    learner: PolicyLearner
    scorers: list[ModelScorer]

    def __init__(self, rank: int, tp: int = 1) -> None:
        self._grid = Grid("cpu", Layout(fsdp=dist.get_world_size() // tp, tp=tp))

    def make(self, kind: str, given: Mapping[str, Any], spare: Sequence[int] = ()) -> None:
        """Make a learner; ``spare`` bytes of each rank stand for those of a GPU."""
        Backend.spare_bytes = lambda _: spare[self._grid.rank] if spare else 0  # type: ignore[assignment,method-assign]
        config = Config.model_validate(given)
        t = config.training
        whole_actor, whole_critic = models(kind)
        with_critic = config.algorithm.definition.critic
        rates = LearningRate(t.lr, UPDATES), LearningRate(t.critic_lr, UPDATES)
        actor = ShardedModel(whole_actor, self._grid, rates[0], t)
        critic = ShardedModel(whole_critic, self._grid, rates[1], t) if with_critic else None
        self.learner = PolicyLearner(
            actor,
            critic,
            ShardedBackprop(
                actor,
                critic,
                Losses(config.algorithm, config.rollout.temperature),
                t.microbatch_tokens,
            ),
            config,
            {"task": 1.0, "environment": 0.5},
        )

    def score(
        self, responses: Sequence[Response], budget: int, on_host: bool
    ) -> tuple[list[list[Score]], int, int]:
        """Score by a reference and a reward model in shards. Return the scores, the tokens that
        were read, and the bytes of weights here.
        """
        scorers = scorers_of(budget, partial(frozen_shards, grid=self._grid, on_host=on_host))
        scores = [scored(scorer, responses) for scorer in scorers]
        weights = [weight for scorer in scorers for weight in scorer.model.parameters()]
        assert all(isinstance(weight, DTensor) for weight in weights)
        held = sum(weight.to_local().nbytes for weight in weights)  # type: ignore[attr-defined]
        return scores, sum(scorer.read_tokens for scorer in scorers), held

    def lend(self, budget: int, starts_adapted: bool | None) -> int:
        """Make scorers that use the learner's shards: the critic, and a reference if there are
        adapters. Return how many more bytes there are.
        """
        before, trained = held_bytes(), self.learner.trained
        actor: Any = trained["actor"]
        critic: Any = trained["critic"]
        passes = GatheredPasses(critic.grid, critic.compute)
        self.scorers = [critic_scorer(critic.model, budget, passes)]
        if starts_adapted is not None:
            adapters = ReferenceAdapters(actor.model, starts_adapted=starts_adapted)
            passes = GatheredPasses(actor.grid, actor.compute, adapters)
            self.scorers += [reference_scorer(actor.model, 0.7, budget, passes)]
        return held_bytes() - before

    def score_by_lent(self, responses: Sequence[Response]) -> list[list[Score]]:
        return [scored(scorer, responses) for scorer in self.scorers]

    def train(self, batches: Sequence[TrainBatch]) -> list[Mapping[str, float]]:
        return [self.learner.train(batch).stats for batch in batches]

    def train_on_groups(
        self, parts: Sequence[TrainBatch], batch: TrainBatch, steps: int
    ) -> list[Mapping[str, float]]:
        stats = []
        for _ in range(steps):
            for part in parts:
                self.learner.accumulate(part)
            stats.append(self.learner.train(batch).stats)
        return stats

    def train_apart(self, batch: TrainBatch, apart: float) -> tuple[dict[str, Tensor], list[str]]:
        """Take a step after which undivided weights are compared, with rank 1's apart by so much;
        return what this rank has of them, and what it warns of.
        """
        actor: Any = self.learner.trained["actor"]
        sharded.COMPARED_EVERY = 1
        names = [name for name, whole in actor.wholes.items() if whole.dim is None]
        with torch.no_grad():
            for name in names if self._grid.rank == 1 else ():
                actor.shard(name).add_(apart)
        with warnings.catch_warnings(record=True) as said:
            self.learner.train(batch)
        told = [str(warning.message) for warning in said if "other slices" in str(warning.message)]
        return {name: actor.shard(name).clone() for name in names}, told

    def reductions(self, batches: Sequence[TrainBatch]) -> list[int]:
        """Train; return how often FSDP has reduced gradients in each step."""
        reduce, counts = _fsdp_param_group.foreach_reduce, list[int]()

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[-1] += 1
            return reduce(*args, **kwargs)

        _fsdp_param_group.foreach_reduce = counted
        try:
            for batch in batches:
                counts.append(0)
                self.learner.train(batch)
        finally:
            _fsdp_param_group.foreach_reduce = reduce
        return counts

    def first_gradients(self, batch: TrainBatch) -> dict[str, Any]:
        """The actor's gradients, before they are clipped and used; on the first rank."""
        return first_gradients(self.learner, "_norm", batch)

    def refused(self, batch: TrainBatch) -> str:
        """The error of a batch that cannot be trained on."""
        try:
            self.learner.train(batch)
        except LearnerError as error:
            return str(error)
        return ""

    def end_updates(self, here: bool) -> None:
        """Let no update begin any more, on some of the ranks."""
        if here:
            self.learner.trained["actor"].end_updates()

    def weights(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Whole trained weights, and fingerprints of all."""
        marks = {name: model.fingerprint() for name, model in self.learner.trained.items()}
        return self.learner.weights(), marks

    def shard_elements(self) -> int:
        """Elements of the actor that this rank holds."""
        actor: Any = self.learner.trained["actor"]
        return sum(p.to_local().numel() for p in actor.model.parameters())

    def logprobs(self, responses: Sequence[Response]) -> Any:
        return self.learner.logprobs(responses)

    def write(self, folder: Path, *versions: int) -> None:
        """Write this rank's pieces of the learner's state, and of the actor as these versions."""
        rank, ranks = self._grid.rank, self._grid.layout.ranks
        actor = self.learner.trained["actor"]
        published = {("actor", v): actor.pieces(actor.snapshot()) for v in versions}
        state = shard_files.packed(self.learner.state_dict(), rank, ranks, published)
        shard_files.write(folder / shard_files.file_name(rank, ranks), state)

    def load(self, path: Path) -> None:
        self.learner.load_state_dict(shard_files.read(path))

    def holds(self, path: Path, version: int) -> bool:
        """Whether this rank's part of a version in files is its part of the actor."""
        actor = self.learner.trained["actor"]
        found = actor.from_pieces(shard_files.read(path)["published"]["actor", version])
        own = actor.snapshot()
        return own.keys() == found.keys() and all(found[n].equal(t) for n, t in own.items())

    def save_beside_passes(self, batch: TrainBatch, folder: Path) -> str:
        """Save again and again while a step is under way that comes to nothing; return its end."""
        self.learner.trained["actor"].end_updates()
        ended = list[str]()
        step = Thread(target=lambda: ended.append(self.refused(batch)))
        step.start()
        for i in range(5):
            self.learner.trained["actor"].save(folder / str(i), byte_tokenizer())
        step.join()
        return ended[0]

    def save(self, folder: Path) -> None:
        self.learner.trained["actor"].save(folder, byte_tokenizer())
