"""The live display, with rich."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.interfaces import worded
from stretto.observe.display import FIGURES, History, Progress, duration, news, repeated
from stretto.observe.run_directory import EVALUATED, SCORE, Sample
from stretto.saying import Advance

_BARS = "▁▂▃▄▅▆▇█"
_SAMPLE_CHARS = 300
_REFRESH_S = 0.2  # seconds between redraws of work in progress


class TerminalConsole(Console):
    """A console whose terminal may go away, without an effect on standard output."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error. Rich would end the process and send standard output to ``/dev/null``."""
        raise BrokenPipeError("the terminal is gone")


class RichProgress(Progress):
    """A panel at the bottom of the terminal, with a bar for each work, below scrolling output."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._history = History()
        self._evaluated: Mapping[str, float] = {}  # the metrics of the last evaluation
        self._live: Live | None = None
        self._shown: RenderableType = Group()
        self._started = False
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[share]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
        )

    def start(self, headline: str) -> None:
        self.note(news(self._console.file, headline))
        self._started = True
        self._open().refresh()

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Redraw the panel."""
        self._history.add(stats)
        self._shown = self._panel(step, total, stats, samples)
        if self._live is not None:
            self._live.refresh()

    def note(self, text: str) -> None:
        if text:
            # A Text, because markup=False would also apply to the panel, which is redrawn.
            self._console.print(Text(worded(text)), soft_wrap=True)

    @contextmanager
    def working(self, what: str, total: int = 0, limit_s: float = math.inf) -> Iterator[Advance]:
        """Show a bar until the work ends, a pulsing one if the total is unknown."""
        live = self._open()
        share = f"0/{total:,}" if total else ""
        bar = self._bars.add_task(what, total=total or None, share=share)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self._bars.update(bar, advance=count, share=f"{done:,}/{total:,}" if total else "")

        def show() -> float:
            live.refresh()
            return _REFRESH_S

        try:
            with repeated(show, 0.0):
                yield advance
        finally:
            self._bars.remove_task(bar)
            if not (self._started or self._bars.task_ids):
                self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live, self._started = None, False

    def _open(self) -> Live:
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, get_renderable=self._picture
            )
            self._live.start()
        return self._live

    def _picture(self) -> RenderableType:
        return Group(self._shown, *([self._bars] if self._bars.task_ids else []))

    def _panel(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> RenderableType:
        eta_s = self._history.eta_s(step, total)
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=total, completed=step, width=30)
        time_left = "" if eta_s is None else f"{duration(eta_s)} left"
        head.add_row(f"step {step}/{total}", bar, time_left)
        if SCORE in stats:
            self._evaluated = {name: x for name, x in stats.items() if name.startswith("eval/")}
        stats = {**self._evaluated, **stats}
        texts = {label: f"{stats[name]:{form}}" for label, name, form in FIGURES if name in stats}
        speed, _ = texts.pop("tokens/s", "-"), texts.pop("step_s", "")
        if "loss" in texts:
            cells = [f"{label} {text}" for label, text in texts.items()]
            cells[0] += f" {self._trend(good=-1)}"
        else:
            reward, kl, length = (texts.get(label, "-") for label in ("reward", "kl", "length"))
            cells = [f"reward [bold]{reward}[/] {self._trend(good=1)}", f"KL {kl}"]
            cells.append(f"length {length}")
            cells += [f"{label} {texts[label]}" for label in ("turns", "wait_s") if label in texts]
        metrics = Table.grid(padding=(0, 3))
        metrics.add_row(*cells, f"{speed} tokens/s")
        parts: list[RenderableType] = [head, metrics, Text(sparkline(list(self._history.curve)))]
        if self._evaluated:
            scores = [f"{n} {texts[n]}" for n in ("eval", "pass@1") if n in texts]
            scores[0] += f" (step {self._evaluated[EVALUATED]:.0f})"
            parts.append(Text("   ".join(scores)))
        for sample in samples[:1]:
            prompt, response = (escape(_short(text)) for text in (sample.prompt, sample.response))
            parts.append(f"[dim]{prompt}[/]\n{response} [dim](reward {sample.reward:.3g})[/]")
        return Panel(Group(*parts), border_style="dim")

    def _trend(self, *, good: int) -> str:
        change = self._history.trend()
        if change is None:
            return ""
        colour = "green" if change * good > 0 else "red"
        return f"[{colour}]{'▲' if change > 0 else '▼'} {change:+.3f}[/]"


def sparkline(values: Sequence[float]) -> str:
    """Draw one bar a value, scaled from the lowest to the highest. Non-finite values are gaps."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BARS) - 1
    return "".join(
        _BARS[round((value - low) / span * top) if span else 0] if math.isfinite(value) else " "
        for value in values
    )


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _SAMPLE_CHARS else flat[:_SAMPLE_CHARS] + " ..."
