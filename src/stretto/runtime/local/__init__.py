"""Roles in processes of their own on this machine; weights travel through files in memory."""

from stretto.runtime.local.run import LocalRun, start

__all__ = ["LocalRun", "start"]
