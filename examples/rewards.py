"""Reward functions of one's own: numbers for answers, in the conventions of TRL and verl.

Shows: what a function is given and returns. Named as 'rewards.py:brief' in
reward.sources, or handed to stretto.train(reward=brief).
"""


def brief(completions, **columns):
    """A whole batch (TRL's convention): more for fewer words."""
    return [1 / (1 + len(text.split())) for text in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """One response (verl's convention): is the reference answer in it?"""
    return float(ground_truth in solution_str)
