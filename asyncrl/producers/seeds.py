"""The seed of each request to the model: a pure function of who asks, never of when."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, prompt_id: str, sample_index: int, turn: int, attempt: int = 0) -> int:
    """Seed in [0, 2**63) of one request, the same in every run with the same arguments.

    `attempt` counts the retries of a rollout: a retry with the same seed would sample the same tokens, and a
    rollout that failed for what it said would fail again. The first attempt, 0, leaves no trace in the hash, so
    that a plain loop without retries needs to know nothing of them.
    """
    parts = [str(run_seed), prompt_id, str(sample_index), str(turn)]
    if attempt:
        parts.append(f"attempt {attempt}")
    key = "\x1f".join(parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
