"""The parts of a run, made from its settings: models, roles, controllers; none knows a runtime."""
