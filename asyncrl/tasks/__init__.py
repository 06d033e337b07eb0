"""Prompts in, rewards out. Knows datasets and reward functions; knows no engine, no version, no torch."""
