"""asyncrl: fully asynchronous reinforcement learning of language models, with a staleness bound that is one."""

__version__ = "0.1.0"
