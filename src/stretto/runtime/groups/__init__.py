"""Real models in processes of their own: groups of ranks on this machine, or on a Ray cluster."""

from stretto.runtime.groups.run import GroupRun, start

__all__ = ["GroupRun", "start"]
