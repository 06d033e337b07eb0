"""The trainer: the controller's client, and the ranks that compute optimizer steps."""
