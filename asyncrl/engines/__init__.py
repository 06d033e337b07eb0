"""Clients of the engine servers: routing, abort and resume. Prompts are token ids; rewards and the
staleness rule do not occur.
"""
