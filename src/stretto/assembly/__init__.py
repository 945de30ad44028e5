"""Making a run's parts from its settings: models, engines, scorers, learner, controllers.

Nothing here knows a runtime.
"""
