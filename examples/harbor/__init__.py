"""Tasks in Harbor's format: the model works with a shell in a sandbox, the task's tests
give the reward.
"""
