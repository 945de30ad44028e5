"""The simulated runtime: the same schedules against a cost model, in virtual time.

- ``loop.py``: an asyncio event loop in which only timers make time pass.
- ``devices.py``: devices that roles occupy while they work, and workers that answer in order.
- ``costs.py``, ``hardware.py``: costs of work; given, or derived from public figures.
- ``calibration.py``: costs fitted to the spans of a real run.
- ``lengths.py``: distributions of response lengths.
- ``decoding.py``, ``generator.py``, ``roles.py``: generator, scorers and learner.
- ``faults.py``: roles that raise, hang or dawdle, on purpose.
- ``cluster.py``, ``simulate.py``: a typed description of a cluster, and a run on it.
- ``replay.py``: the description of a run that was recorded.
"""
