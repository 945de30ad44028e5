"""Scorers of rollouts: by code, by a reward model, by the reference and by the critic."""
