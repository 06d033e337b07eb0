"""Clients of the engine servers: routing, abort and resume. They handle token ids, not rewards or
staleness.
"""
