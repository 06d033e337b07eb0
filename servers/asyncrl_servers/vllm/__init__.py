"""vLLM server of a run, in vLLM's own Python environment."""
