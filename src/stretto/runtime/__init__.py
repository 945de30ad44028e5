"""On what the work runs."""
