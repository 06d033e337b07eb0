"""The client of a vLLM server: the only part of asyncrl that knows vLLM's routes."""

from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.server import VllmServer

__all__ = ["VllmFacts", "VllmServer"]
