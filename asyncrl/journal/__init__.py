"""Ordered record of a run in one SQLite file, complete enough to resume a killed run."""
