"""Learners over ranks that hold pipeline stages, in the ranks of tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from episode_helpers import WEIGHTS
from helpers import critic_of, llama
from mapped_workers import held_bytes, load
from stretto.config import Config, ModelConfig
from stretto.errors import StrettoError
from stretto.models.load import set_checkpointing
from stretto.models.lora import add_lora
from stretto.models.tiny import byte_tokenizer
from stretto.training import pipelined, shard_files
from stretto.training.learner import PolicyLearner
from stretto.training.shard_files import STEP
from stretto.training.trained import LearningRate
from stretto.types import Response, TrainBatch

CPU = torch.device("cpu")
UPDATES = 10


def models(kind: str) -> tuple[Any, Any]:
    """An actor and a critic, the same on every rank."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    actor = llama(dtype=dtype, tied=kind != "untied")
    critic = critic_of(actor)
    if kind == "lora":
        lora = ModelConfig(lora_rank=2)
        return add_lora(actor, lora, "CAUSAL_LM"), add_lora(critic, lora, "SEQ_CLS")
    if kind == "partly frozen":
        # On the rank of their first stages both have nothing to train, the critic but its head.
        actor.model.embed_tokens.requires_grad_(False)
        actor.model.layers[0].requires_grad_(False)
        critic.requires_grad_(False)
        critic.score.requires_grad_(True)
    if kind == "frozen":
        actor.requires_grad_(False)
    if kind == "checkpointing":
        for model in (actor, critic):
            set_checkpointing(model, ModelConfig(gradient_checkpointing="on"))
            model.eval()
    return actor, critic


class StagedRank:
    """A rank that makes one learner after the other."""

    learner: PolicyLearner

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def make(self, kind: str, given: Mapping[str, Any]) -> None:
        self._make(*models(kind), given)

    def _make(self, actor: Any, critic: Any, given: Mapping[str, Any]) -> None:
        config = Config.model_validate(given)
        t = config.training
        rates: Any = {
            "actor": LearningRate(t.lr, UPDATES),
            "critic": LearningRate(t.critic_lr, UPDATES),
        }
        staged = pipelined.make(actor, critic, config, rates, CPU)
        first, second = staged.models["actor"], staged.models["critic"]
        self.learner = PolicyLearner(first, second, staged, config, WEIGHTS, snapshots=["actor"])

    def make_from(self, folder: Path, given: Mapping[str, Any]) -> tuple[int, int]:
        """Make a learner from a model's files. Return the bytes that this rank holds of stages, and
        of all tensors.
        """
        before = held_bytes()
        actor, critic = (
            load(folder, torch.float32, kind, in_files=True) for kind in ("actor", "critic")
        )
        self._make(actor, critic, given)
        del actor, critic
        stages = (trained.model for trained in self.learner.trained.values())
        weights = {p.data_ptr(): p.nbytes for stage in stages for p in stage.parameters()}
        return sum(weights.values()), held_bytes() - before

    def train(self, batches: Sequence[TrainBatch]) -> list[Mapping[str, float]]:
        return [self.learner.train(batch).stats for batch in batches]

    def update_states(self) -> dict[str, tuple[int, int]]:
        """Bytes of AdamW's moments here, and of masters that are not the weights, by model."""
        held = {}
        for name, model in self.learner.trained.items():
            states = model._optimizer.state.values()
            moments = sum(v.nbytes for s in states for k, v in s.items() if k != STEP)
            pairs = zip(model._masters, model._weights, strict=True)
            masters = [m.untyped_storage() for m, weight in pairs if m is not weight]
            held[name] = moments, sum(storage.nbytes() for storage in masters)
        return held

    def refused(self, batch: TrainBatch) -> str:
        """The code of the error of a batch that cannot be trained on."""
        try:
            self.learner.train(batch)
        except StrettoError as error:
            return error.code
        return ""

    def not_made(self, kind: str, given: Mapping[str, Any]) -> str:
        """The code of the error of a learner that cannot be made."""
        try:
            self.make(kind, given)
        except StrettoError as error:
            return error.code
        return ""

    def skip(self) -> None:
        self.learner.trained["actor"].skip()

    def weights(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
        """Whole trained weights, on the first rank, and fingerprints of all."""
        marks = {name: model.fingerprint() for name, model in self.learner.trained.items()}
        return self.learner.weights(), marks

    def publish(self) -> tuple[str, Mapping[str, Tensor]]:
        """Publish a version of the actor. Return its fingerprint, and what this rank has of it."""
        ref = self.learner.publish()["actor"]
        return ref.fingerprint, dict(self.learner.channel.get(ref))

    def logprobs(self, responses: Sequence[Response]) -> Any:
        return self.learner.logprobs(responses)

    def fill(self, name: str, value: float) -> None:
        """Set all masters of a parameter of the critic."""
        masters = self.learner.trained["critic"].state_dict()["masters"]
        if name in masters:
            shard = masters[name]
            (shard if isinstance(shard, Tensor) else shard.tensor).fill_(value)

    def write(self, folder: Path, *versions: int) -> None:
        """Write this rank's pieces of the learner's state, and of the actor as these versions."""
        ranks, actor = dist.get_world_size(), self.learner.trained["actor"]
        published = {("actor", v): actor.pieces(actor.snapshot()) for v in versions}
        state = shard_files.packed(self.learner.state_dict(), self._rank, ranks, published)
        shard_files.write(folder / shard_files.file_name(self._rank, ranks), state)

    def load(self, path: Path) -> None:
        self.learner.load_state_dict(shard_files.read(path))

    def save(self, folder: Path) -> None:
        self.learner.trained["actor"].save(folder, byte_tokenizer())
