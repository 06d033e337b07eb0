"""The embedded engine: continuous batching of our own over any Hugging Face causal language model."""
