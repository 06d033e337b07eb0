"""Servers of the extension scoring: reward models."""
