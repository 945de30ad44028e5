"""The simulated runtime: the same schedules against a cost model, in virtual time.

- ``loop.py``: an asyncio event loop in which only timers make time pass.
- ``devices.py``: what a role occupies while it works, and the order in which it answers.
- ``costs.py``, ``hardware.py``: how long work takes; given, or derived from public figures.
- ``calibration.py``: the same, fitted to the spans of a real run.
- ``lengths.py``: how long responses get.
- ``decoding.py``, ``generator.py``, ``roles.py``: generator, scorers and learner.
- ``faults.py``: roles that raise, hang or dawdle, on purpose.
- ``cluster.py``, ``simulate.py``: a typed description of a cluster, and a run on it.
- ``replay.py``: such a description of a run that was recorded.
"""
