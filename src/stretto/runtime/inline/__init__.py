"""Real models in this process: every role works on a thread of it."""

from stretto.runtime.inline.run import InlineRun, start

__all__ = ["InlineRun", "start"]
