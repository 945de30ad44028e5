"""What the seeds of a comparison allow to be said: which schedules differ from the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.observe.intervals import LEVEL, ratio_interval

Ratios = Mapping[str, Sequence[float | None]]
"""By variant, a ratio for each seed that both it and the baseline ran; above 1 is better than the
baseline. ``None`` where one of the two did not reach the target."""


def verdict(what: str, baseline: str, ratios: Ratios) -> str:
    """A sentence on which variants are better or worse than the baseline, and which may be neither.

    A difference is significant where the interval of the mean ratio leaves out 1. A variant with a
    pair that lacks a ratio is not judged: the pairs that have one are a selection.

    Args:
        what: compared quantity, which is the better the smaller it is.
        ratios: of the variants, without the baseline.
    """
    said: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for variant, pairs in ratios.items():
        kind, figures = _judged(pairs)
        said[kind].append(f"{variant} {figures}")
    found = "; ".join(f"{kind}: {', '.join(some)}" for kind, some in said.items() if some)
    return (
        f"{what}, {baseline}'s over the schedule's own, paired by seed: geometric mean and its "
        f"{100 * LEVEL:.0f} % interval (Student's t on logarithms), each schedule by itself. "
        f"{found}."
    )


_KINDS = _FEWER, _MORE, _EITHER, _UNKNOWN = (
    "significantly fewer",
    "significantly more",
    "no significant difference",
    "not judged",
)


def _judged(pairs: Sequence[float | None]) -> tuple[str, str]:
    """What can be said of a variant, and the figures that it rests on."""
    known = [ratio for ratio in pairs if ratio is not None]
    found = ratio_interval(known)
    if found is None or len(known) < len(pairs):
        return _UNKNOWN, f"({len(known)} of {len(pairs)} pairs reached the target)"
    kind = _FEWER if found.low > 1 else _MORE if found.high < 1 else _EITHER
    return kind, f"{found.mean:.2f}x [{found.low:.2f}, {found.high:.2f}]"
