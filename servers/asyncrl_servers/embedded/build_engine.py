"""Checks at start, on the loaded model and the machine at hand, what the engine promises. Knows the runner
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.http import Refused, fail
from asyncrl.weights.adapters import linear_parameters
from asyncrl_servers.embedded.decode_loop import Engine
from asyncrl_servers.embedded.decoder import READ_ERRORS, LoadedModel, load_model, read_parameters
from asyncrl_servers.embedded.kv_memory import EmbeddedSpec, available_bytes, check_memory
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import Runner

# Puts an engine together from its spec. Knows all the parts; ends the process if one cannot work.


def build_engine(
    spec: EmbeddedSpec, on_crash: Callable[[BaseException | None], None] = lambda _: None
) -> Engine:
    """A loaded and checked engine, not started yet. Prints an ErrorBody line and raises SystemExit(1) if it
    cannot work.
    """
    torch.set_num_threads(spec.threads)
    loaded = load_model(spec)
    weight_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
    # A swap on CUDA is a copy in place, with the old weights kept until it is verified.
    staged_bytes = weight_bytes * (2 if loaded.device.type == "cuda" else 1)
    if spec.has_adapters:  # the weights of the start stay beside what is merged over them
        linear = linear_parameters(loaded.model)
        staged_bytes += sum(
            parameter.nbytes for name, parameter in loaded.model.named_parameters() if name in linear
        )
    plan = check_memory(
        spec,
        loaded.shape,
        loaded.dtype.itemsize,
        loaded.vocab_size,
        staged_bytes,
        available_bytes(loaded.device),
    )
    # CUDA kernels are chosen by size, so the promise is kept and checked on CPU alone.
    is_exact = spec.deterministic and loaded.device.type == "cpu"
    runner = Runner(
        loaded, spec.slots, spec.max_length, is_exact=is_exact, prompt_cache_bytes=plan.prompt_cache
    )
    check_same_model(runner, spec.name)
    if is_exact:
        check_determinism(runner, spec.name, spec.slots)
    runner.num_prefilled = 0
    return Engine(
        runner,
        Weights(
            loaded.model,
            spec.start_version,
            read_start=lambda: _read_start(spec, loaded),
            has_adapters=spec.has_adapters,
        ),
        name=spec.name,
        slots=spec.slots,
        max_length=spec.max_length,
        max_queued=spec.max_queued,
        threads=spec.threads,
        on_crash=on_crash,
    )


def _read_start(spec: EmbeddedSpec, loaded: LoadedModel) -> dict[str, Tensor]:
    try:
        return read_parameters(Path(spec.model_path), loaded.dtype, loaded.device)
    except READ_ERRORS as error:
        raise Refused(
            409,
            f"{spec.name}: cannot restore the weights of the start from {spec.model_path}: {error}",
            way_out="put the folder back, or wake without restore and push.",
        ) from error


TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15}
"""Largest difference between our logits and the model's own attention, relative to the largest logit."""


@torch.inference_mode()
def check_same_model(runner: Runner, name: str) -> None:
    """End the process if logits over the slot cache are not those of the model's own attention."""
    loaded = runner.loaded
    ids, reference_TV = loaded.probe_ids, loaded.reference_logits
    num_prefilled = max(1, len(ids) - 2)
    ours = [runner.prefill([(0, ids[:num_prefilled])])[0]]
    ours += [
        _decode(runner, 1, ids[position], position + 1)[0] for position in range(num_prefilled, len(ids))
    ]
    difference = (torch.stack(ours).float() - reference_TV[num_prefilled - 1 :]).abs().max().item()
    scale = max(1.0, reference_TV.abs().max().item())
    if not difference <= TOLERANCE[loaded.dtype] * scale:
        fail(
            f"{name}: logits over the slot cache differ from {type(loaded.model).__name__}'s own by "
            f"{difference:.4g}, "
            f"the largest logit being {scale:.4g}",
            rule=f"they may differ by {TOLERANCE[loaded.dtype]:.4g} of the largest",
            way_out="the model's attention is of a kind this engine does not reproduce: use another model.",
        )


@torch.inference_mode()
def check_determinism(runner: Runner, name: str, slots: int) -> None:
    """End the process if a sequence's logits depend on what stands beside it, on its slot, or on how it was
    resumed.
    """
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
        if not (
            all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
            and torch.equal(resumed, alone[-1])
        ):
            fail(
                f"{name}: a sequence's logits change with {n - 1} others beside it (dtype "
                f"{runner.loaded.dtype}, "
                f"{torch.get_num_threads()} threads)",
                rule="rollout.deterministic=true promises tokens that depend on prompt, seed and weights "
                "alone",
                way_out="set rollout.threads=1, model.dtype=float32, or rollout.deterministic=false.",
            )


def _decode(runner: Runner, n: int, token_id: int, length: int) -> Tensor:
    """Logits [n, V] of a step in which row n-1 takes `token_id` as token number length-1; the others stay
    short.
    """
    last_ids, lengths = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    last_ids[-1], lengths[-1] = token_id, length
    return runner.decode(last_ids, lengths)
