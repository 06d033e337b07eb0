"""Clients of the engine servers: routing, abort and resume. Knows no prompt's meaning, no reward, no staleness rule."""

from asyncrl.engines.pool import EnginePool, PoolStats, SegmentServer
from asyncrl.engines.server import EngineServer

__all__ = ["EnginePool", "EngineServer", "PoolStats", "SegmentServer"]
