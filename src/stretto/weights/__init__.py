"""How weights get from the learner to those who follow it: by a channel, never through a schedule.

A schedule hands on a ticket (:class:`~stretto.types.WeightsRef`); who loads it takes the tensors
from the channel that the ticket names, and proves by a fingerprint that it holds them.
"""
