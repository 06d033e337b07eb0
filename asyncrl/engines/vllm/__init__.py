"""The client of a vLLM server: the only part of asyncrl that knows vLLM's routes."""
