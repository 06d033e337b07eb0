"""The seed of each request to the model: a pure function of who asks, never of when."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, seed_id: str, sample_index: int, turn: int, attempt: int = 0) -> int:
    """Seed in [0, 2**63) of one request, the same in every run with the same arguments.

    `seed_id` names the prompt and how often it was handed back (Prompt.seed_id), `attempt` counts the retries of a rollout: with the
    same seed it would sample the same tokens, and what failed for what it said, or was too long, would do so again. The first of
    each leaves no trace in the hash, so that a plain loop without retries needs to know nothing of them.
    """
    parts = [str(run_seed), seed_id, str(sample_index), str(turn)]
    if attempt:
        parts.append(f"attempt {attempt}")
    key = "\x1f".join(parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
