"""Fused pipeline schedules: two models through one set of devices, filling each other's bubbles."""
