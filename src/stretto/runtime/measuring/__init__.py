"""This machine, measured: what a planner needs to know of it.

A model with random weights of a run's shape is read, decoded and trained by what a run uses. The
points become the figures of :mod:`stretto.planning.hardware`, in the units of its formulas.
"""
