"""What would fail later, found before torch is imported and before a run has a folder.

Names, files, columns, reward functions, model folders, libraries, devices, layouts and memory are
looked at in a second. ``assembly/checks.py`` has what needs a model or a tokenizer.
"""

from stretto.checks.run import check_measured, check_run, check_supervised

__all__ = ["check_measured", "check_run", "check_supervised"]
