"""Brings each policy_version to every engine server while they keep generating. Knows no batch, no rollout."""

from asyncrl.publisher.publisher import Publisher, PublisherStats

__all__ = ["Publisher", "PublisherStats"]
