"""Ranks: their process, steps, optimizer, offloads and saved state."""
