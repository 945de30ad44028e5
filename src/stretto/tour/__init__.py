"""The tour: PPO and its cost in four parts that run, for people who are new to it.

- ``page.py``: plain text: headings, paragraphs, tables.
- ``models.py``: part 1, the four models and their memory.
- ``rollout.py``: part 2, one rollout phase with its shapes.
- ``training.py``: part 3, a few iterations.
- ``analysis.py``: part 4, with ``flows.py``, ``costs.py``, ``placements.py``: what that run sent,
  computed, and would have taken elsewhere.

Every figure on a page is computed while it is shown.
"""
