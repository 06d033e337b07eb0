"""Brings each policy_version to every engine server: while they keep generating, or in turns."""
