"""asyncrl: fully asynchronous reinforcement learning of language models, with a hard staleness bound on every
token.
"""

__version__ = "0.1.0"
