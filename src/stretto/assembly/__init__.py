"""From settings to parts: models, engines, scorers, learner, controllers. Knows no runtime."""
