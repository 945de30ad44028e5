"""Prediction of a run's memory, traffic and time, from formulas, measurements and simulation."""
