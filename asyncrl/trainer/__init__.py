"""The trainer: the controller's client, and its ranks."""
