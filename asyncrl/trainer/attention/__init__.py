"""Attention over packed texts, and how texts share a forward pass."""
