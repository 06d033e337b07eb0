"""Models of the trainer: built, adapted, compiled, exported."""
