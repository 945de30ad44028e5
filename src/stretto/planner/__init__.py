"""Prediction: memory, traffic and time of a run, from formulas, measurements and simulation."""
