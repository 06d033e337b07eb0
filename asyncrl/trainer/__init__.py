"""The optimizer steps: the controller's client, and the ranks that compute them from batches of tokens."""
