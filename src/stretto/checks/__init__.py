"""Checks that find a run's faults in a second, before torch is imported and the run gets a folder.
``assembly/checks.py`` has those that need a model or a tokenizer."""

from stretto.checks.preflight import check_measured, check_run, check_supervised

__all__ = ["check_measured", "check_run", "check_supervised"]
