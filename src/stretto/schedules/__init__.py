"""The schedules: when each piece of work runs. They know roles by their protocols alone."""
