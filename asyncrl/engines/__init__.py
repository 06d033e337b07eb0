"""Clients of the engine servers: routing, abort and resume. Knows no prompt's meaning, no reward, no staleness rule."""

from asyncrl.engines.client import EngineClient
from asyncrl.engines.pool import EnginePool, PoolStats, SegmentServer
from asyncrl.engines.server import EngineServer
from asyncrl.engines.vllm import VllmFacts, VllmServer

__all__ = ["EngineClient", "EnginePool", "EngineServer", "PoolStats", "SegmentServer", "VllmFacts", "VllmServer"]
