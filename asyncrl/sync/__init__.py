"""Pushes of each policy_version to every engine server, during generation or
time-shared.
"""
