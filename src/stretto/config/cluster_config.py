"""Settings of runs whose roles work in separate processes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

from stretto.config.sections import (
    NonNegativeInt,
    Positive,
    PositiveInt,
    Rules,
    Seconds,
    Section,
    Workers,
    WorkersOrAuto,
)

LEARNER = "learner"
"""The role that trains."""
_DEVICE = re.compile(r"|cpu|cuda|cuda:\d+")


def generator_names(count: int) -> list[str]:
    return [f"generator {i}" for i in range(count)] if count > 1 else ["generator"]


class ProcessConfig(Section):
    """One process and the roles that take turns in it, or several ranks that hold one role."""

    roles: tuple[str, ...]
    """Roles: learner; generator, or generator 0, generator 1 ... for several; reference; critic (as
    a scorer); a source of reward.sources that begins with 'model:'. Numbered copies of a scorer
    (reference 0, reference 1 ...) share its work."""
    threads: WorkersOrAuto = 0
    """CPU threads of all its ranks together; 0 divides the cores among processes that work at the
    same time."""
    device: str = ""
    """Device, for example cuda:1 or cpu; empty spreads processes over the GPUs. For several ranks,
    the first one's."""
    fsdp: Workers = 1
    """Ranks of the learner that shard every weight, its gradient and its optimizer state (FSDP2),
    and share the passes."""
    tp: Workers = 1
    """Slices into which linear layers are split (tensor parallelism). One rank holds a slice; in a
    learner, fsdp ranks do. Roles in the learner's processes are split into fsdp x tp slices,
    which must divide the model's numbers of heads. If they do not, a reference or reward model is
    sharded instead."""
    python: str = ""
    """Python interpreter of these processes, for example .venv-vllm/bin/python, if their libraries
    need other versions. The same version of Stretto must be installed there."""
    offload: bool = False
    """Keep frozen weights and optimizer states of idle roles in the host's memory, pinned for GPUs.
    For roles that take turns: the tensors return before the role's turn, if possible while the
    previous role works."""

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp

    @property
    def generates(self) -> bool:
        return any(role.startswith("generator") for role in self.roles)

    def rules(self, broken: Rules) -> None:
        """Check that the roles can work in these processes."""
        broken["process-without-roles"] = not self.roles and (
            "cluster.processes: a process without roles; name some, or remove it"
        )
        learns = LEARNER in self.roles
        broken["fsdp-without-learner"] = (self.fsdp > 1 and not learns) and (
            f"cluster.processes: fsdp = {self.fsdp} is for the learner, and these processes "
            f"have {', '.join(self.roles)}; set tp instead, which cuts any model"
        )
        broken["offload-of-one-role"] = (self.offload and len(self.roles) == 1) and (
            f"cluster.processes: offload moves roles that take turns, and the {self.roles[0]} "
            "has these processes for itself; leave it out, or add roles"
        )
        broken["python-of-learner"] = (self.python and learns) and (
            f"cluster.processes: python = '{self.python}' is for generators and scorers, and these "
            "processes have the learner; start the run with that interpreter, or leave it out"
        )
        broken["unknown-device"] = not _DEVICE.fullmatch(self.device) and (
            f"cluster.processes: unknown device = '{self.device}'; name 'cpu', or as in 'cuda:1'"
        )


class ClusterConfig(Section):
    """Processes of a run with runtime = 'local' or 'ray'. Tables [[cluster.processes]], only in
    files, place roles by hand."""

    scorers: Literal["auto", "apart", "together", "generators"] = "auto"
    """Place of model scorers. apart: a process each. together: one process for all. generators: a
    copy of each in every generator's process, which works when nothing is left to decode there.
    auto: generators if stragglers migrate and scorers do not stream, else apart."""
    processes: tuple[ProcessConfig, ...] = ()
    """Processes by hand. Roles that they do not name are placed by cluster.scorers."""
    restarts: NonNegativeInt = 2
    """How often each generator or scorer is restarted if its process dies, hangs beyond
    schedule.deadline_s or raises, and any process that dies while the run starts. 0 ends the run at
    the first failure."""
    start_timeout_s: Seconds = 600.0
    """Time limit in seconds for each phase of a process's start: getting its place and connecting,
    joining its group, loading its models. A warm-up has no limit."""
    weight_sync_timeout_s: Seconds = 60.0
    """Time limit of a weight sync in seconds, or ten times the usual duration if longer. Then the
    transfer is aborted and retried once. Up to a quarter of schedule.deadline_s."""
    bucket_mb: PositiveInt = 64
    """MiB of weights per message; each side of a transfer has two buffers of this size."""
    probe_tolerance: Positive | Literal["auto"] = "auto"
    """Largest difference (root mean square, in nats) between the log-probs of engine and learner on
    a fixed probe after each weight sync. auto: 0.001 in float32, 0.2 in bfloat16. More than four
    times that of the first sync is reported."""
    interface: str = ""
    """Network interface between processes of a cluster; empty: the loopback with runtime = 'local',
    the one that leads to the driver with 'ray'."""
    address: str = ""
    """Address of a running Ray cluster, or 'auto'; empty starts one on this machine that ends with
    the run."""
    forward: tuple[str, ...] = ()
    """Names of environment variables that are passed on to Ray's processes, in addition to those of
    the libraries."""

    def process_of(self, role: str) -> ProcessConfig:
        matches = (p for p in self.processes if role in p.roles)
        return next(matches, ProcessConfig(roles=(role,)))

    def rules(self, broken: Rules) -> None:
        """Check that each role has one place, and that roles may share it."""
        places = Counter(role for process in self.processes for role in process.roles)
        twice = next((role for role, n in places.items() if n > 1), "")
        broken["role-placed-twice"] = twice and (
            f"cluster.processes: '{twice}' has {places[twice]} places; name it once"
        )
        kinds = [(Counter(role.split()[0] for role in p.roles), p.ranks) for p in self.processes]
        broken["generators-share-process"] = any(roles["generator"] > 1 for roles, _ in kinds) and (
            "cluster.processes: two generators in one process take turns and gain nothing; "
            "lower rollout.engines, or give each a process"
        )
        both = any(roles.keys() >= {LEARNER, "generator"} and n == 1 for roles, n in kinds)
        broken["learner-with-generator"] = both and (
            "cluster.processes: learner and generator in one process is what runtime = 'inline' "
            "does; give them processes of their own, on one device where they are to share it"
        )
        well_formed = self.address in ("", "auto", "local") or ":" in self.address
        broken["no-address"] = not well_formed and (
            f"cluster.address = '{self.address}' is no address; write HOST:PORT, or 'auto'"
        )
