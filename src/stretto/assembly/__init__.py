"""Builds models, roles and controllers from the settings, independent of the runtime."""
