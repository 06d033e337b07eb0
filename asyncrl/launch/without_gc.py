"""Turns garbage collection off in the process that imports this module."""

import gc

gc.disable()
