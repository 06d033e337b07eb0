"""Advantages, losses, weights and penalties: pure tensor functions with their papers.

Token tensors cover M loss tokens of whole sequences: float32, logprobs in nats.
sequence_M int64 is each token's sequence, 0 to S-1, ascending. A sequence is a branch
of a rollout. Reward tensors have shape [B]: one entry per rollout, or per rewarded part
of it.
"""
