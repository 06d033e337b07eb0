"""Placement of processes, turns on shared devices, and supervision."""
