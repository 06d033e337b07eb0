"""Generators, retries, seeds, evaluation and recordings."""
