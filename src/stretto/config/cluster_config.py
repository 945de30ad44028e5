"""Settings of runs whose roles work in separate processes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

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
from stretto.errors import RuleError
from stretto.layout import INDEPENDENT, Layout

LEARNER, GENERATOR = "learner", "generator"
"""The role that trains, and the one of all engines."""
_DEVICE = re.compile(r"|cpu|cuda|cuda:\d+")


AUTO = "auto"


def generator_names(count: int) -> list[str]:
    return [f"generator {i}" for i in range(count)] if count > 1 else ["generator"]


def _kind(role: str) -> str:
    """Return a role's name without a copy's number."""
    name, _, number = role.rpartition(" ")
    return name if number.isdecimal() else role


def _without_auto(layouts: Any) -> Any:
    if not isinstance(layouts, dict):
        return {} if layouts == AUTO else layouts
    for role, layout in layouts.items():
        sizes = layout.items() if isinstance(layout, dict) else ()
        flag = next((name for name, size in sizes if isinstance(size, bool)), "")
        if flag:  # pydantic would take true as 1
            raise RuleError(
                f"cluster.processes: layout.{role} has {flag} = {str(layout[flag]).lower()}; write "
                f"a number, as in {flag} = 4",
                "layout-without-number",
            )
    return {role: layout for role, layout in layouts.items() if layout != AUTO}


class ProcessConfig(Section):
    """One process and the roles that take turns in it, or several ranks that share its roles."""

    roles: tuple[str, ...]
    """Roles: learner; generator, which stands for all engines, or generator 0, generator 1 ... for
    single ones; reference; teacher (one of several: teacher-NAME); critic (as a scorer); a source
    of reward.sources that begins with 'model:'. Numbered copies of a scorer (reference 0, reference
    1 ...) share its work."""
    ranks: Workers = 1
    """Ranks, which are processes with a device each. All of them hold each role, by its layout."""
    layout: Annotated[dict[str, Layout], BeforeValidator(_without_auto)] = {}
    """How the ranks divide a role's model, as in layout.learner = { fsdp = 4, tp = 2 }: copies (dp)
    x shards (fsdp, gathered layer by layer) x slices of linear layers (tp, which divides the
    model's heads). The product is the number of ranks. The learner has one copy, generators no
    shards. Each copy of a generator is an engine. 'auto', or no layout: a learner is sharded,
    other roles take the least slicing that divides the model's heads and fits the memory plan."""
    threads: WorkersOrAuto = 0
    """CPU threads of all its ranks together; 0 divides the cores among processes that work at the
    same time."""
    device: str = ""
    """Device, for example cuda:1 or cpu; empty spreads processes over the GPUs. For several ranks,
    the first one's."""
    python: str = ""
    """Python interpreter of these processes, for example .venv-vllm/bin/python, if their libraries
    need other versions. The same version of Stretto must be installed there."""
    offload: bool = False
    """Keep frozen weights and optimizer states of idle roles in the host's memory, pinned for GPUs.
    For roles that take turns: the tensors return before the role's turn, if possible while the
    previous role works."""

    @property
    def generates(self) -> bool:
        return any(role.startswith(GENERATOR) for role in self.roles)

    def layout_of(self, role: str, engines: int = 1) -> Layout | None:
        """Return a role's layout in these ranks. ``None`` if it is open: a scorer without one, or
        a generator whose number of ``engines`` in these ranks is 0.
        """
        kind = _kind(role)
        if layout := self.layout.get(role, self.layout.get(kind)):
            return layout
        if role == LEARNER:
            return Layout.sharded(self.ranks)
        if kind != GENERATOR or not engines:
            return None
        return Layout.independent(max(self.ranks, engines), engines)

    def rules(self, broken: Rules) -> None:
        """Check that the roles can work in these processes."""
        broken["process-without-roles"] = not self.roles and (
            "cluster.processes: a process without roles; name some, or remove it"
        )
        learns = LEARNER in self.roles
        self._layout_rules(broken)
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

    def _layout_rules(self, broken: Rules) -> None:
        for role, layout in self.layout.items():
            here = f"cluster.processes: layout.{role} = {layout}"
            has_role = role in {*self.roles, *map(_kind, self.roles)}
            broken["layout-of-no-role"] = not has_role and (
                f"{here}, and these processes have {', '.join(self.roles)}; name one of these"
            )
            broken["layout-of-other-ranks"] = layout.ranks != self.ranks and (
                f"{here} is for {layout.ranks} ranks, and these processes have ranks = "
                f"{self.ranks}; choose numbers whose product is {self.ranks}"
            )
            broken["stages-in-layout"] = layout.has_stages and (
                f"{here}: pipeline stages are set by pipeline.ranks; leave pp out"
            )
            broken["copies-of-learner"] = (role == LEARNER and layout.dp > 1) and (
                f"{here}: the ranks of a learner share its states; set fsdp instead of dp"
            )
            broken["shards-of-generator"] = (role == GENERATOR and layout.gathers) and (
                f"{here}: an engine would gather all layers for each token; set {INDEPENDENT} "
                "instead"
            )
            scores = role not in (LEARNER, GENERATOR)
            broken["copies-of-shards"] = (scores and layout.dp > 1 and layout.gathers) and (
                f"{here}: the ranks of shards share the responses already; leave dp out"
            )
            if any(broken.values()):
                return


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

    @property
    def learner_layout(self) -> Layout:
        return self.process_of(LEARNER).layout_of(LEARNER) or Layout()

    def layouts(self, role: str, engines: int = 1) -> list[Layout]:
        """Return a role's layouts in the processes that are named and hold it, if known."""
        layouts = list[Layout]()
        for process in self.processes:
            if role in map(_kind, process.roles):
                layout = process.layout_of(role, engines if role in process.roles else 1)
                layouts += [layout] if layout else []
        return layouts

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
            "lower rollout.engines, give each a process, or write 'generator' for all of them in "
            "several ranks"
        )
        both = any(roles.keys() >= {LEARNER, "generator"} and n == 1 for roles, n in kinds)
        broken["learner-with-generator"] = both and (
            "cluster.processes: learner and generator in one process is what runtime = 'inline' "
            "does; give them processes of their own, on one device if they are to share it, or set "
            "ranks to share several (with pipelines: ranks = pipeline.ranks)"
        )
        well_formed = self.address in ("", "auto", "local") or ":" in self.address
        broken["no-address"] = not well_formed and (
            f"cluster.address = '{self.address}' is no address; write HOST:PORT, or 'auto'"
        )
