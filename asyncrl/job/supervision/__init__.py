"""Restart processes that died or hang, up to a limit."""
