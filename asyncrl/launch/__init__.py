"""Which process runs where, and whose turn it is on a shared device; starts, watches and ends the child
processes.
"""
