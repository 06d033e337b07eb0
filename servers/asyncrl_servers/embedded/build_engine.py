"""Builds an engine from its spec, and checks its guarantees on the loaded model and this machine. Ends the
process if one of them fails.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncrl.http import fail
from asyncrl.weights.adapters import linear_parameters
from asyncrl_servers.embedded.decode_loop import Engine
from asyncrl_servers.embedded.decoder import load_model
from asyncrl_servers.embedded.kv_memory import EmbeddedSpec, available_bytes, check_memory
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import Runner

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15}
"""Largest difference between our logits and the model's own attention, relative to the largest logit."""


def build_engine(spec: EmbeddedSpec, on_crash: Callable[[BaseException], None] | None = None) -> Engine:
    """A loaded and checked engine, not started yet. Prints an ErrorBody line and raises SystemExit(1) if it
    cannot work.
    """
    torch.set_num_threads(spec.threads)
    loaded = load_model(spec)
    staged = [parameter.nbytes for parameter in loaded.model.parameters()]
    if spec.has_adapters:  # the weights of the start stay beside what is merged over them
        linear = linear_parameters(loaded.model)
        staged += [one.nbytes for name, one in loaded.model.named_parameters() if name in linear]
    check_memory(
        spec,
        slot_bytes=loaded.shape.slot_bytes(spec.max_length, loaded.dtype.itemsize),
        vocab_size=loaded.vocab_size,
        staged_bytes=sum(staged),
        free=available_bytes(loaded.device),
    )
    # CUDA kernels are chosen by size, so the promise is kept and checked on CPU alone.
    is_exact = spec.deterministic and loaded.device.type == "cpu"
    runner = Runner(loaded, spec.slots, spec.max_length, is_exact=is_exact)
    check_same_model(runner, spec.name)
    if is_exact:
        check_determinism(runner, spec.name)
    return Engine(spec, runner, Weights(loaded, spec), on_crash)


@torch.inference_mode()
def check_same_model(runner: Runner, name: str) -> None:
    """End the process if logits over the slot cache are not those of the model's own attention."""
    loaded = runner.loaded
    ids, reference_TV = loaded.probe_ids, loaded.reference_logits
    num_prefilled = max(1, len(ids) - 2)
    ours = [runner.prefill([(0, ids[:num_prefilled])])[0]]
    ours += [_decode(runner, 1, ids[at], at + 1)[0] for at in range(num_prefilled, len(ids))]
    difference = (torch.stack(ours).float() - reference_TV[num_prefilled - 1 :]).abs().max().item()
    scale = max(1.0, reference_TV.abs().max().item())
    if not difference <= TOLERANCE[loaded.dtype] * scale:
        fail(
            f"{name}: logits over the slot cache differ from {type(loaded.model).__name__}'s own by "
            f"{difference:.4g}, the largest logit being {scale:.4g}",
            rule=f"they may differ by {TOLERANCE[loaded.dtype]:.4g} of the largest",
            way_out="use another model: this engine does not reproduce its attention.",
        )


@torch.inference_mode()
def check_determinism(runner: Runner, name: str) -> None:
    """End the process if a sequence's logits depend on what stands beside it, on its slot, or on how it was
    resumed.
    """
    total, slots = min(40, runner.max_length), runner.slots
    ids = [(5 * i + 1) % runner.loaded.vocab_size for i in range(total)]
    first = total - min(3, total - 1)

    def logits(others: list[tuple[int, list[int]]]) -> list[Tensor]:
        slot = len(others)
        found = [runner.prefill([*others, (slot, ids[:first])])[-1]]
        return found + [_decode(runner, slot + 1, ids[at], at + 1)[-1] for at in range(first, total)]

    alone = logits([])
    for n in sorted({1, min(2, slots), min(17, slots), slots}):
        others = [(slot, ids[: 1 + slot % min(4, total)]) for slot in range(n - 1)]
        beside, resumed = logits(others), runner.prefill([(n - 1, ids), *others])[0]
        if not all(map(torch.equal, [*alone, alone[-1]], [*beside, resumed])):
            fail(
                f"{name}: a sequence's logits change with {n - 1} others beside it (dtype "
                f"{runner.loaded.dtype}, {torch.get_num_threads()} threads)",
                rule="rollout.deterministic=true: tokens depend on prompt, seed and weights alone",
                way_out="set rollout.threads=1, model.dtype=float32, or rollout.deterministic=false.",
            )


def _decode(runner: Runner, n: int, token_id: int, length: int) -> Tensor:
    """Logits [n, V] of a step in which row n-1 takes `token_id` as token number length-1; the others stay
    short.
    """
    last_ids, lengths = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    last_ids[-1], lengths[-1] = token_id, length
    return runner.decode(last_ids, lengths)
