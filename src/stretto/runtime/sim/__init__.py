"""The simulated runtime: the same schedules against a cost model, in virtual time.

- ``loop.py``: an asyncio event loop in which only timers make time pass.
- ``devices.py``: devices that roles occupy while they work, and workers that answer in order.
- ``costs.py``: costs of work, as numbers; :mod:`stretto.planner` makes them.
- ``lengths.py``: distributions of response lengths.
- ``decoding.py``, ``generator.py``, ``roles.py``: generator, scorers and learner.
- ``faults.py``: roles that raise, hang or dawdle, on purpose.
- ``cluster.py``, ``simulate.py``: a typed description of a cluster, and a run on it.
"""
