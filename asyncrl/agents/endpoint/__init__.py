"""The OpenAI-compatible endpoint over an EnginePool, the record of what it sampled, and the work queue.
Rewards are carried and not read; groups and staleness do not occur.
"""
