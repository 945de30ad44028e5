"""Channels that carry weights from the learner to the roles that follow it, bypassing the schedule.

A schedule passes on a ticket (:class:`~stretto.types.WeightsRef`). The role that loads it takes the
tensors from the channel named in the ticket, and proves by a fingerprint that it holds them.
"""
