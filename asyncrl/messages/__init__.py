"""The records that parts and processes exchange, each defined once. Imports no torch."""
