"""The OpenAI-compatible endpoint over a SamplingEngine, and what was sampled through it. Knows no reward, no
group, no staleness.
"""
