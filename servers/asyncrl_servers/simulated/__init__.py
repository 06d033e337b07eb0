"""The simulated engine: the same endpoints with a latency model and no model, for load tests and
benchmarks.
"""
