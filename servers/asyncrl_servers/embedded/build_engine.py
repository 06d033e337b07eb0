"""Build an engine from its spec and check memory and guarantees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.http import fail
from asyncrl.weights.adapters import linear_parameters, routers_of
from asyncrl_servers.embedded.decode_loop import Engine
from asyncrl_servers.embedded.decoder import CudaCaptures, EmbeddedSpec, LoadedModel
from asyncrl_servers.embedded.kv_attention import NO_INTS
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.embedded.scoring import Scorer

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15}
"""Maximum difference to the model's own logits, relative to the largest."""


def build_engine(spec: EmbeddedSpec, on_crash: Callable[[BaseException], None] | None = None) -> Engine:
    """Return a checked engine. On failure print an ErrorBody line and exit with 1."""
    torch.set_num_threads(spec.threads)
    loaded = LoadedModel(spec)
    twice = linear_parameters(loaded.model) if spec.has_adapters else set()
    staged = [one.nbytes * (1 + (name in twice)) for name, one in loaded.model.named_parameters()]
    # Per slot in float32: the logits after its prompt; a step's logits, logprobs, exponentials and float64
    # sum.
    slot_bytes = loaded.shape.slot_bytes(spec.max_length, loaded.dtype.itemsize) + 7 * 4 * loaded.vocab_size
    staged_bytes = 0 if spec.score_slots or spec.takes_turns else sum(staged)
    if spec.receives_bytes:  # the incoming and the previous buffer
        staged_bytes += 2 * min(sum(staged), max(spec.receives_bytes, *staged))
    check_memory(spec, slot_bytes=slot_bytes, staged_bytes=staged_bytes, free_bytes=loaded.free_bytes())
    # CUDA picks kernels by size, so bits are guaranteed only on CPU. An expert's rounding changes with the
    # number of rows routed to it.
    wanted = not routers_of(loaded.model) if spec.deterministic == "auto" else spec.deterministic
    is_exact = wanted and loaded.device.type == "cpu"
    runner = Runner(loaded, spec.slots + spec.num_kept, spec.max_length, is_exact=is_exact)
    check_same_model(runner, spec.name)
    if is_exact:
        check_determinism(runner, spec.name)
    if loaded.device.type == "cuda":
        runner.take_graphs(spec.slots, CudaCaptures)
    scorer = Scorer(loaded, spec, is_exact=is_exact) if spec.score_slots else None
    return Engine(spec, runner, Weights(loaded, spec), on_crash, scorer)


def check_memory(spec: EmbeddedSpec, *, slot_bytes: int, staged_bytes: int, free_bytes: int) -> None:
    """End the process if slots and staged weights do not fit."""
    slot_bytes *= 1 + spec.keeps_turns
    fitting, slots = (free_bytes - staged_bytes) // slot_bytes, spec.slots + spec.score_slots
    if slots > fitting:
        is_slots = fitting >= 1 and not spec.score_slots
        slot, staged, free = (f"{size / 2**20:.1f} MiB" for size in (slot_bytes, staged_bytes, free_bytes))
        way_out = "lower rollout.max_tokens, use a smaller model, or free memory."
        fail(
            f"{spec.name}: {slots} slots of {spec.max_length} tokens need {slot} each, staged weights "
            f"need {staged}, and {free} are free",
            rule="all memory is reserved at start, so that it cannot run out later",
            way_out=f"set rollout.slots={fitting} or less, or {way_out}" if is_slots else way_out,
        )


@torch.inference_mode()
def check_same_model(runner: Runner, name: str) -> None:
    """End the process if logits differ from the model's own."""
    loaded = runner.loaded
    ids, reference_TV = loaded.probe_ids, loaded.reference_logits
    num_prefilled = max(1, len(ids) - 2)
    ours = [runner.prefill([(0, ids[:num_prefilled], 0)])[0]]
    ours += [_decode(runner, 1, ids[at], at + 1)[0] for at in range(num_prefilled, len(ids))]
    difference = (torch.stack(ours).float() - reference_TV[num_prefilled - 1 :]).abs().max().item()
    limit = TOLERANCE[loaded.dtype] * max(1.0, reference_TV.abs().max().item())
    if not difference <= limit:
        fail(
            f"{name}: logits over the slot cache differ from {type(loaded.model).__name__}'s own by "
            f"{difference:.4g}, {limit:.4g} is the limit",
            way_out="use another model: this engine does not reproduce its attention.",
        )


@torch.inference_mode()
def check_determinism(runner: Runner, name: str) -> None:
    """End the process unless logits are batch-invariant."""
    total, slots = min(40, runner.max_length), runner.slots
    ids = [(5 * i + 1) % runner.loaded.vocab_size for i in range(total)]
    first = total - min(3, total - 1)

    def logits(others: list[tuple[int, list[int], int]]) -> list[Tensor]:
        slot = len(others)
        found = [runner.prefill([*others, (slot, ids[:first], 0)])[-1]]
        return found + [_decode(runner, slot + 1, ids[at], at + 1)[-1] for at in range(first, total)]

    alone = logits([])
    for n in sorted({1, min(2, slots), min(17, slots), slots}):
        others = [(slot, ids[: 1 + slot % min(4, total)], 0) for slot in range(n - 1)]
        beside, resumed = logits(others), runner.prefill([(n - 1, ids, 0), *others])[0]
        runner.cache.copy_slot(n - 1, 0, total - 1)
        job = (min(1, slots - 1), ids, total // 2)
        runner.cache.copy_slot(0, job[0], total - 1)
        last = np.array([ids[-1]]), np.array([total])
        joined = runner.step(*last, [job]) if slots > 1 else runner.prefill([job])
        if slots > 1:
            half = total // 2
            shared = runner.step(NO_INTS, NO_INTS, [(0, ids, 0), (1, ids, half)], [(0, 1, half)])
            joined = torch.cat([joined, shared])
        found = [*beside, resumed, *joined]
        if not all(map(torch.equal, [*alone, *[alone[-1]] * (1 + len(joined))], found)):
            fail(
                f"{name}: a sequence's logits change with {n - 1} others in the batch (dtype "
                f"{runner.loaded.dtype}, {torch.get_num_threads()} threads)",
                rule="rollout.deterministic (auto or true): tokens depend only on prompt, seed and weights",
                way_out="set rollout.threads=1, model.dtype=float32, or rollout.deterministic=false.",
            )


def _decode(runner: Runner, n: int, token_id: int, length: int) -> Tensor:
    """Return logits [n, V]; row n-1 takes `token_id` as token number length-1."""
    last_ids, lengths = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    last_ids[-1], lengths[-1] = token_id, length
    return runner.decode(last_ids, lengths)
