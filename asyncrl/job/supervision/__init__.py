"""Starts processes again that died or hang, and says when that is one time too many."""
