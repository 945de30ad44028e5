"""The tour: PPO and its cost in four parts that run, for people who are new to it.

Every figure on a page is computed while it is shown.
"""
