"""The OpenAI-compatible endpoint over a EnginePool, and the record of what it sampled. It knows nothing
of rewards, groups or staleness.
"""
