"""Clients of the engine servers: routing, abort and resume. Knows no prompt's meaning, no reward, no
staleness rule.
"""
