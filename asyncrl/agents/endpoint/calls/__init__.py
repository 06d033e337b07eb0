"""Calls: accepted messages, sampling, delivery."""
