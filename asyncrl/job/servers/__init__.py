"""Servers of a run and their start arguments."""
