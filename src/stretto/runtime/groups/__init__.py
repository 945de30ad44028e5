"""Real models in processes of their own: groups of ranks on this machine, or on a Ray cluster."""
