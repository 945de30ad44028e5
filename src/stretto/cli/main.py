"""``stretto COMMAND ...``: runs a command, and turns errors into a line and an exit status.

Exit status: 0 done, 1 ``doctor`` found something broken or a run of ``compare`` failed, 2 invalid
request, 130 Ctrl-C, 143 SIGTERM (128 plus the signal's number), which stops a command in the same
way. A command's module is imported only when it is used.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from stretto import __version__, signals
from stretto.errors import StrettoError, nearest
from stretto.interfaces import CommandLine, through
from stretto.models.backend import keep_freed_memory

COMMANDS = {
    "train": "train a model with reinforcement learning",
    "sft": "fine-tune a model on demonstrations",
    "reward": "train a reward model on preferences, or let one label pairs",
    "align": "all three stages: demonstrations, reward model, reinforcement learning",
    "generate": "let a model answer prompts",
    "chat": "talk to a model, or to the policy of a run",
    "serve": "serve a model, or a policy while it trains, by OpenAI's API",
    "eval": "measure a model: pass@1, mean score, win-rates, KL, benchmarks",
    "label": "label preferences with a gold reward",
    "recipes": "list the recipes that commands take by name, or print one",
    "compare": "run the same training under several schedules, side by side",
    "replay": "repeat a recorded run bit for bit, and find what differs",
    "report": "show runs: curves, timelines, utilisation, samples",
    "watch": "show runs as they go on, on a page that is kept up to date",
    "pipeline": "plan one pipeline schedule for actor and critic, and say how good it is",
    "doctor": "say what this machine has, and what would not work on it",
    "plan": "plan a run on many GPUs: layouts and schedules, before it is started",
    "memory": "plan the memory of the four models of PPO",
    "completion": "print a script that completes commands and options in a shell",
}

MODULES = {
    **dict.fromkeys(("sft", "reward", "align", "recipes", "replay"), "train"),
    **dict.fromkeys(("eval", "label"), "evaluate"),
    **dict.fromkeys(("report", "watch"), "compare"),
    "chat": "generate",
}
"""Modules with several commands. Their functions are named after the commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (``sys.argv`` by default) and return the exit status."""
    keep_freed_memory()
    arguments = list(sys.argv[1:] if argv is None else argv)
    line = CommandLine(line=shlex.join(["stretto", *arguments]))
    if descriptor := os.environ.pop(signals.PARENT, ""):
        signals.end_with(int(descriptor))
    try:
        with signals.ending_in_order(), through(line):
            status = dispatch(arguments)
        sys.stdout.flush()
    except StrettoError as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        print(f"stretto: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        by = stop.number if isinstance(stop, signals.Terminated) else signal.SIGINT
        with suppress(OSError):  # the terminal may be gone
            print("stretto: interrupted", file=sys.stderr)
        return 128 + by
    except BrokenPipeError:
        # The reader is gone (for example `| head`). Buffered output must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def dispatch(arguments: list[str]) -> int:
    """Run the command that the arguments begin with. Errors are raised."""
    name, *rest = arguments or ["--help"]
    if name == "help" and rest:
        name, *rest = *rest, "--help"
    if name in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10} {line}" for name, line in COMMANDS.items())
        print(
            "usage: stretto COMMAND [OPTIONS]\n\n"
            "Reinforcement learning from feedback on language models.\n\n"
            f"commands:\n{commands}\n\n"
            "'stretto COMMAND --help' documents every option. Start with: stretto train"
        )
        return 0 if arguments else 2
    if name in ("--version", "-V", "version"):
        print(__version__)
        return 0
    if name not in COMMANDS:
        tour = "The tour runs in a clone: `python -m examples.tour`, or examples/tour/tour.ipynb."
        advice = tour if name == "tour" else nearest(name, COMMANDS)
        print(f"stretto: unknown command '{name}'. {advice}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"stretto.cli.{MODULES.get(name, name)}")
    if run := getattr(module, f"run_{name}", None):  # it offers a run's settings
        return int(run(rest))
    from stretto.cli.parsing import call

    return call(getattr(module, f"command_{name}"), name, rest)
