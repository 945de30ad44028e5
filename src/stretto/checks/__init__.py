"""Checks that find a run's faults in a second, before torch is imported and the run gets a folder.
They cover names, files, columns, reward functions, model folders, libraries, devices, layouts and
memory. Checks that need a model or a tokenizer are in ``assembly/checks.py``."""

from stretto.checks.run import check_measured, check_run, check_supervised

__all__ = ["check_measured", "check_run", "check_supervised"]
