"""Checks at start, on the loaded model and the machine at hand, what the engine promises. Knows the runner alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncrl.serving import fail
from asyncrl_servers.embedded.runner import Runner

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15}
"""Largest difference between our logits and the model's own attention, relative to the largest logit."""


@torch.inference_mode()
def check_same_model(runner: Runner, name: str) -> None:
    """End the process if logits over the slot cache are not those of the model's own attention."""
    loaded = runner.loaded
    ids, reference_TV = loaded.probe_ids, loaded.reference_logits
    num_prefilled = max(1, len(ids) - 2)
    ours = [runner.prefill([(0, ids[:num_prefilled])])[0]]
    ours += [_decode(runner, 1, ids[position], position + 1)[0] for position in range(num_prefilled, len(ids))]
    difference = (torch.stack(ours).float() - reference_TV[num_prefilled - 1 :]).abs().max().item()
    scale = max(1.0, reference_TV.abs().max().item())
    if not difference <= TOLERANCE[loaded.dtype] * scale:
        fail(
            f"{name}: logits over the slot cache differ from {type(loaded.model).__name__}'s own by {difference:.4g}, "
            f"the largest logit being {scale:.4g}",
            rule=f"they may differ by {TOLERANCE[loaded.dtype]:.4g} of the largest",
            way_out="the model's attention is of a kind this engine does not reproduce: use another model.",
        )


@torch.inference_mode()
def check_determinism(runner: Runner, name: str, slots: int) -> None:
    """End the process if a sequence's logits depend on what stands beside it, on its slot, or on how it was resumed."""
    total = min(40, runner.max_length)
    ids = [(5 * i + 1) % runner.loaded.vocab_size for i in range(total)]
    num_decoded = min(3, total - 1)
    alone = [runner.prefill([(0, ids[: total - num_decoded])])[0]]
    alone += [_decode(runner, 1, ids[at], at + 1)[0] for at in range(total - num_decoded, total)]
    for n in sorted({1, min(2, slots), min(17, slots), slots}):
        others = [(slot, ids[: 1 + slot % min(4, total)]) for slot in range(n - 1)]
        beside = [runner.prefill([*others, (n - 1, ids[: total - num_decoded])])[-1]]
        beside += [_decode(runner, n, ids[at], at + 1)[-1] for at in range(total - num_decoded, total)]
        resumed = runner.prefill([(n - 1, ids), *others])[0]
        if not (all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True)) and torch.equal(resumed, alone[-1])):
            fail(
                f"{name}: a sequence's logits change with {n - 1} others beside it (dtype {runner.loaded.dtype}, "
                f"{torch.get_num_threads()} threads)",
                rule="rollout.deterministic=true promises tokens that depend on prompt, seed and weights alone",
                way_out="set rollout.threads=1, model.dtype=float32, or rollout.deterministic=false.",
            )


def _decode(runner: Runner, n: int, token_id: int, length: int) -> Tensor:
    """Logits [n, V] of a step in which row n-1 takes `token_id` as token number length-1; the others stay short."""
    last_ids, lengths = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    last_ids[-1], lengths[-1] = token_id, length
    return runner.decode(last_ids, lengths)
