"""Running a fused schedule: two models cut into stages, one process a device."""
