"""Servers of the extension scoring: teachers and reward models."""
