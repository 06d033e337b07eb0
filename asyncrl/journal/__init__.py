"""What happened, in order, in one SQLite file: all that a killed run needs to go on. Knows no torch, no HTTP,
no staleness rule.
"""
