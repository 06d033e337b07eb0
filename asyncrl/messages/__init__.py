"""Records exchanged between parts and processes. Imports no torch."""
