"""The simulated runtime: the same schedules against a cost model, in virtual time.

``loop.py`` is an asyncio event loop in which only timers make time pass, ``cluster.py`` a typed
description of a cluster, and ``simulate.py`` a run on it. Costs of work are numbers, which
:mod:`stretto.planner` makes.
"""
