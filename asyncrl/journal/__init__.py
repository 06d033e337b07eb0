"""Ordered record of a run in one SQLite file."""
