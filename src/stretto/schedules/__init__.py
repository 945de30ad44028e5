"""Schedules decide when each piece of work runs. They know roles only by their protocols."""
