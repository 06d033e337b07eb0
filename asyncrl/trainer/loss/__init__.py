"""From a batch to micro-batches, and from logprobs to a loss and its metrics."""
