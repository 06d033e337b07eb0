"""Clients of the engine servers: routing, abort and resume."""
