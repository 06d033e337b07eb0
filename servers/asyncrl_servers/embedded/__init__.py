"""Embedded engine: continuous batching over Hugging Face causal language models."""
