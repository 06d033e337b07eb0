"""Measurements of scripts/gpu_acceptance.py, each in its own process."""
