"""The rollouts between the queue and the batch: OPPO's buffer (inter-step overlap).

It is FIFO and holds a round plus delta. Carried rollouts come before fresh ones, and the first to
end make the batch. A *group* (the rollouts of one prompt in one draw) is carried or chosen
together, so that algorithms can compare all its rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from stretto.bounds import ceil_div
from stretto.errors import LifecycleError
from stretto.schedules.rollout import Rollout, restored
from stretto.types import Prompt, episode_of


@dataclass(slots=True, eq=False)
class _PromptGroup:
    rollouts: list[Rollout]  # of one prompt, with all samples of its episodes
    open: int  # rollouts that have not ended
    place: int = -1  # in the order in which groups end, -1 before
    size: int = field(init=False)  # draws: the samples of an episode count once

    def __post_init__(self) -> None:
        self.size = len({episode_of(r.id) for r in self.rollouts})


class Buffer:
    """Groups in draw order, and the groups chosen for the current round.

    A round takes the first ``groups`` groups to end, unless it must wait for another, so that:

    - No group is carried more than ``max_carries`` times.
    - Of the groups with k or fewer carries left, a round leaves no more than ``k * groups``,
      because the next k rounds cannot take more.
    """

    def __init__(self, max_carries: int) -> None:
        self._max_carries = max_carries
        self._groups: dict[int, _PromptGroup] = {}
        self._chosen: list[_PromptGroup] = []
        self._wanted = 0
        self._due: list[int] = []  # [k]: groups with k or fewer carries left, still to choose
        self._ended = 0

    def __len__(self) -> int:
        return sum(group.size for group in self._groups.values())

    def __iter__(self) -> Iterator[Rollout]:
        for group in self._groups.values():
            yield from group.rollouts

    @property
    def open(self) -> Sequence[Rollout]:
        return [r for r in self if r.finish is None]

    @property
    def chosen(self) -> Sequence[Rollout]:
        rollouts = (r for g in self._chosen for r in g.rollouts)
        return sorted(rollouts, key=lambda r: (episode_of(r.id), r.id))

    @property
    def chosen_size(self) -> int:
        return sum(group.size for group in self._chosen)

    @property
    def complete(self) -> bool:
        return len(self._chosen) == self._wanted

    def add(self, group: Sequence[Rollout]) -> None:
        self._groups[group[0].group] = _PromptGroup(list(group), len(group))

    def join(self, fork: Rollout) -> None:
        """Add a further sample of an episode to its group."""
        group = self._groups[fork.group]
        fork.carries = group.rollouts[0].carries
        group.rollouts.append(fork)
        group.open += 1

    def drop(self, fork: Rollout) -> None:
        """Remove an open sample whose episode starts again."""
        group = self._groups[fork.group]
        group.rollouts.remove(fork)
        group.open -= 1

    def begin_round(self, groups: int) -> Sequence[Rollout]:
        """Start a round. Returns the rollouts chosen at once, because they ended before it."""
        if len(self._groups) > (self._max_carries + 1) * groups:
            raise LifecycleError(
                f"{len(self._groups)} groups are in flight and a round takes {groups}: not all can "
                f"be trained on before they are carried more than {self._max_carries} times",
                "carried-too-often",
            )
        self._wanted, self._chosen = groups, []
        self._set_due()
        return self._choose_ended()

    def _choose_ended(self) -> Sequence[Rollout]:
        ended_groups = [g for g in self._groups.values() if g.place >= 0 and g not in self._chosen]
        ended_groups.sort(key=lambda g: g.place)
        return [r for g in ended_groups for r in self._choose(g)]

    def ended(self, rollout: Rollout) -> Sequence[Rollout]:
        """Record that a rollout has ended. Returns the rollouts chosen as a result."""
        group = self._groups[rollout.group]
        group.open -= 1
        if group.open:
            return ()
        group.place, self._ended = self._ended, self._ended + 1
        return self._choose(group)

    def of_group(self, number: int) -> Sequence[Rollout]:
        """Return a group's rollouts if all have ended."""
        group = self._groups.get(number)
        return group.rollouts if group and not group.open else ()

    def remove(self, number: int) -> Sequence[Rollout]:
        """Remove an ended group. Returns the rollouts chosen in its place."""
        group = self._groups.pop(number)
        if group in self._chosen:
            self._chosen.remove(group)
        else:
            self._due = [n - (k >= self._left(group)) for k, n in enumerate(self._due)]
        return self._choose_ended()

    def missing(self) -> int:
        """Return the smallest number of rollouts that must still end to complete the round."""
        open_by_carries: dict[int, list[int]] = {}
        for group in self._groups.values():
            if group.open:
                k = min(self._left(group), len(self._due))
                open_by_carries.setdefault(k, []).append(group.open)
        needed = [*self._due, self._wanted - len(self._chosen)]
        cheapest: list[int] = []
        n_groups = rollouts = 0
        for k, least in enumerate(needed):
            for open_ in open_by_carries.get(k, ()):
                heappush(cheapest, open_)
            while n_groups < least:
                n_groups, rollouts = n_groups + 1, rollouts + heappop(cheapest)
        return rollouts

    def take(self) -> tuple[Sequence[Rollout], Sequence[Rollout]]:
        """End a complete round (else LifecycleError). Returns its rollouts and the open ones."""
        if not self.complete:
            raise LifecycleError(
                f"a round has {len(self._chosen)} of its {self._wanted} groups", "round-incomplete"
            )
        batch = self.chosen
        for group in self._chosen:
            del self._groups[group.rollouts[0].group]
        self._chosen = []
        self._wanted = 0
        self._due = []
        for rollout in self:
            rollout.carries += 1
        return batch, self.open

    def _left(self, group: _PromptGroup) -> int:
        return self._max_carries - group.rollouts[0].carries

    def _set_due(self) -> None:
        carries_left = Counter(map(self._left, self._groups.values()))
        rounds = min(self._max_carries, ceil_div(len(self._groups), max(self._wanted, 1)))
        self._due, total = [], 0
        for k in range(rounds):
            total += carries_left[k]
            self._due.append(total - k * self._wanted)

    def _choose(self, group: _PromptGroup) -> Sequence[Rollout]:
        """Take an ended group into the round, unless its place is due to another group."""
        room = self._wanted - len(self._chosen) - 1
        due = [n - (k >= self._left(group)) for k, n in enumerate(self._due)]
        if room < max([0, *due]):
            return ()
        self._due = due
        self._chosen.append(group)
        return group.rollouts

    def state_dict(self) -> dict[str, Any]:
        """Return the groups with their rollouts, and the round's choice."""
        return {
            "groups": [[r.state_dict() for r in g.rollouts] for g in self._groups.values()],
            "places": [g.place for g in self._groups.values()],
            "chosen": [g.rollouts[0].group for g in self._chosen],
            "wanted": self._wanted,
            "ended": self._ended,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_by_id: Callable[[int], Prompt]
    ) -> None:
        """Restore :meth:`state_dict`, which has only the ids of prompts."""
        self._groups = {}
        for rollout_states, place in zip(state["groups"], state["places"], strict=True):
            rollouts = restored(rollout_states, prompt_by_id)
            group = _PromptGroup(rollouts, sum(r.finish is None for r in rollouts), place)
            self._groups[rollouts[0].group] = group
        self._wanted = state["wanted"]
        self._ended = state["ended"]
        self._chosen = []
        self._set_due()
        for id_ in state["chosen"]:
            self._choose(self._groups[id_])
