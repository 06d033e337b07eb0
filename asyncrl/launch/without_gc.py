"""Disables garbage collection on import."""

import gc

gc.disable()
