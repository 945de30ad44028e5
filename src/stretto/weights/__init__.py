"""Channels that bring weights from the learner to the roles that follow it, past the schedule.

A schedule hands on a ticket (:class:`~stretto.types.WeightsRef`). A role that loads it takes the
tensors from the channel that the ticket names, and proves by a fingerprint that it holds them.
"""
