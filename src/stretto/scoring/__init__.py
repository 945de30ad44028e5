"""Scorers: what rollouts are worth, by code, by a reward model, by the reference and the critic."""
