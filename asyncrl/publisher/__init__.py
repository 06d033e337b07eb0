"""Brings each policy_version to every engine server: while they keep generating, or in turns. Knows no batch, no rollout."""

from asyncrl.publisher.broadcast import Broadcasts
from asyncrl.publisher.chunk_publisher import ChunkPublisher
from asyncrl.publisher.publisher import Publisher, PublisherStats

__all__ = ["Broadcasts", "ChunkPublisher", "Publisher", "PublisherStats"]
