"""Layouts: which GPUs hold which role, and how each model is divided among them."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import ConfigError
from stretto.planning.hardware import Links
from stretto.planning.shapes import Models


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices of a role.

    Attributes:
        data: shards of the learner (FSDP), or copies of a generator or scorer.
        tensor: devices over which the matrices of each of them are split (tensor parallelism).
    """

    data: int
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.data < 1 or self.tensor < 1:
            raise ConfigError(
                f"a mesh of {self.data} x {self.tensor} devices: both numbers are 1 or more"
            )

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.data * self.tensor

    def data_bytes_per_s(self, links: Links) -> float:
        """Return the speed of collectives over ``data``; tensor-parallel devices are neighbours."""
        a_node = max(1, links.gpus_per_node // self.tensor)
        return links.bytes_per_s(self.data, min(self.data, a_node))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the roles of a run are.

    Attributes:
        learner: of actor and critic, both trained on all of its devices, one after the other.
        generator: of the actor that generates.
        scorer: of the frozen models.
        colocated: all roles are on all devices and take turns; else each has devices of its own,
            and the critic's values come from a copy beside the frozen models.
        offload: roles that are not at work keep their states in the host's memory.
        checkpointing: layers keep their inputs alone, and are computed again in the backward pass.
        micro_tokens: tokens of a micro-batch of one shard of the learner.
        prefill_tokens: tokens of a pass without gradients of one generator or scorer.
    """

    learner: Mesh
    generator: Mesh
    scorer: Mesh
    colocated: bool
    offload: bool = False
    checkpointing: bool = True
    micro_tokens: int = 8192
    prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        meshes = (self.learner, self.generator, self.scorer)
        if self.colocated and len({mesh.devices for mesh in meshes}) > 1:
            counts = ", ".join(str(mesh.devices) for mesh in meshes)
            raise ConfigError(
                f"learner, generators and scorers on {counts} devices: colocated roles are on the "
                "same devices; give each as many, or set them apart"
            )
        if self.offload and not self.colocated:
            raise ConfigError(
                "offload moves roles that take turns on a device; roles apart have their devices "
                "for themselves: leave it out, or colocate them"
            )
        if min(self.micro_tokens, self.prefill_tokens) < 1:
            raise ConfigError(
                f"passes of {self.micro_tokens} and {self.prefill_tokens} tokens: give 1 or more"
            )

    @property
    def gpus(self) -> int:
        """Devices of all roles."""
        if self.colocated:
            return self.learner.devices
        return self.learner.devices + self.generator.devices + self.scorer.devices

    def check(self, models: Models, links: Links) -> None:
        """Check that the models can be divided so.

        Raises:
            ConfigError: they cannot.
        """
        pairs = (
            (self.learner, models.actor),
            (self.learner, models.critic),
            (self.generator, models.actor),
            (self.scorer, models.reference),
            (self.scorer, models.reward),
        )
        for mesh, shape in pairs:
            if shape.heads % mesh.tensor or shape.kv_heads % mesh.tensor:
                raise ConfigError(
                    f"tensor parallelism {mesh.tensor} of a model with {shape.heads} heads, "
                    f"{shape.kv_heads} of keys and values: it must divide both"
                )
            if mesh.tensor > links.gpus_per_node:
                raise ConfigError(
                    f"tensor parallelism {mesh.tensor} on nodes of {links.gpus_per_node} GPUs: "
                    "it must stay within a node"
                )


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step trains on. All responses are taken to be as long as the average.

    Attributes:
        responses: of a step.
        prompt_tokens, response_tokens: of each, on average.
        epochs: passes over them, with an update each.
    """

    responses: int = 512
    prompt_tokens: int = 512
    response_tokens: int = 512
    epochs: int = 1

    def __post_init__(self) -> None:
        counts = (self.responses, self.prompt_tokens, self.response_tokens, self.epochs)
        if min(counts) < 1:
            raise ConfigError(
                f"{self.responses} responses of {self.prompt_tokens} and {self.response_tokens} "
                f"tokens in {self.epochs} epochs: each number is 1 or more"
            )

    @property
    def length(self) -> int:
        """Tokens of a prompt and its response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return self.responses * self.length
