"""The trainer's policy model."""
