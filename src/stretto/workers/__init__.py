"""Threads and processes that work for a run: starting, asking, watching and ending them."""
