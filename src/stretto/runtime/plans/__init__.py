"""Plans: layouts and schedules of a run on many GPUs, searched for with the simulator."""
