"""Advantages, losses, weights and penalties: pure tensor functions, each with its paper. Independent of
device and model; they log nothing.

The tensors of tokens are those of M loss tokens, whole sequences one after another: float32, logprobs in
nats. sequence_M int64 numbers each token's sequence, 0 to S-1, ascending. A sequence is a branch of a
rollout. What concerns a reward is of shape [B]: a rollout's, or that of each part of it which earned one of
its own.
"""
