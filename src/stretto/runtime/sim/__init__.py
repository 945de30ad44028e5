"""The simulated runtime: the same schedules against a cost model, in virtual time."""
