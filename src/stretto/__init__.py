"""Stretto: reinforcement learning from feedback on language models.

Importing this package loads nothing heavy; nor do ``stretto.config`` and ``stretto.recipes``.
"""

__version__ = "0.1.0"
