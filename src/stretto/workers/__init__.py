"""Threads and processes that work for a run: how they are started, asked, watched and ended."""
