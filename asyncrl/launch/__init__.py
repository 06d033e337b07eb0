"""Placement of processes, time slices on shared devices, and supervision."""
