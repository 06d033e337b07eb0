"""Advantages and losses: pure tensor functions, each with its paper. Knows no device, no config, no logging."""
