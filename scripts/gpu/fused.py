"""The fused decode step of the embedded engine against the plain one and transformers'
own forward.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl_servers.embedded.decoder import EmbeddedSpec, LoadedModel
from asyncrl_servers.embedded.fused_decode import KERNEL_DEVICES, FusedSteps
from asyncrl_servers.embedded.runner import DecodeGraphs, Runner
from gpu.models import make_folder
from gpu.rows import Bench, NotRunError

PROMPTS = (1, 63, 64, 65, 300, 1000)
"""Prompt lengths: around a block of the kernel, and over many."""
DECODED = 8
LIMITS = {"float32": 2e-3, "bfloat16": 0.05}
"""Largest distance between logprobs of sampled tokens, in nats."""
WARM_UP, STEPS = 8, 40
"""The first steps capture graphs."""
TIMED_LENGTH = 300
MAX_LENGTH = 1088


@torch.inference_mode()
def fused_step(bench: Bench) -> None:
    """Compare logprobs in float32 and bfloat16, then time both steps at 1 to 256 rows."""
    if bench.device not in KERNEL_DEVICES:
        raise NotRunError(f"fused steps have no kernel for {bench.device}")
    # each cache has another shape; an engine has one
    torch._dynamo.config.recompile_limit = 64
    for dtype, limit in LIMITS.items():
        _compare(bench, dtype, limit)
    most_rows = 8 if bench.is_tiny else 256
    runner = Runner(
        _load(bench, "bfloat16"), most_rows, TIMED_LENGTH + 64, is_exact=False
    )
    assert runner.plain is not None
    kinds = [
        kind(runner, runner.plain, most_rows) for kind in (DecodeGraphs, FusedSteps)
    ]
    for steps in kinds:
        steps.is_refused = bench.device != "cuda"
    for rows in (2, 4, 1, 8) if bench.is_tiny else (64, 256, 1, 32):
        ids, lengths = np.ones(rows, np.int64), np.full(rows, TIMED_LENGTH, np.int64)
        plain, fused = (
            1e3 * bench.timed(partial(steps.step, ids, lengths), WARM_UP, STEPS)
            for steps in kinds
        )
        what = f"step of {rows} rows at {TIMED_LENGTH} tokens"
        against = f"plain step {plain:.3f} ms, {plain / fused:.2f} times"
        bench.tell(what, f"{fused:.3f} ms", against=against)


def _load(bench: Bench, dtype: str) -> LoadedModel:
    folder = str(make_folder(bench, "0.6B"))
    values = {
        "slots": len(PROMPTS),
        "max_length": MAX_LENGTH,
        "deterministic": False,
        "device": bench.device,
    }
    return LoadedModel(
        EmbeddedSpec(name="fused", model_path=folder, dtype=dtype, **values)
    )


def _compare(bench: Bench, dtype: str, limit: float) -> None:
    """Read the same prompts and feed the same random tokens to all."""
    loaded = _load(bench, dtype)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, loaded.vocab_size, length + DECODED) for length in PROMPTS]
    found = {}
    for name, kind in (("plain", DecodeGraphs), ("fused", FusedSteps)):
        runner = Runner(loaded, len(texts), MAX_LENGTH, is_exact=False)
        runner.step([(slot, text[:-DECODED], 0) for slot, text in enumerate(texts)])
        assert runner.plain is not None
        runner.graphs = kind(runner, runner.plain, len(texts))
        runner.graphs.is_refused = bench.device != "cuda"
        found[name] = _decode(runner, texts)
    model = AutoModelForCausalLM.from_pretrained(loaded.folder, dtype=torch.float32).to(
        bench.device
    )
    expected = torch.stack([_own_logprobs(model, text) for text in texts], dim=1)
    for name, logprobs_SR in found.items():
        distance = (logprobs_SR - expected).abs().max().item()
        bench.check(
            f"{name} step in {dtype} against transformers in float32", distance, limit
        )
    distance = (found["fused"] - found["plain"]).abs().max().item()
    bench.check(f"fused step in {dtype} against the plain step", distance, limit)


def _decode(runner: Runner, texts: list[np.ndarray]) -> Tensor:
    """Return logprobs [DECODED - 1, rows] of the texts' last tokens."""
    steps = []
    for left in range(DECODED, 1, -1):
        last_ids = np.array([text[-left] for text in texts])
        lengths = np.array([len(text) - left + 1 for text in texts])
        logprobs_RV = runner.step((), last_ids, lengths).float().log_softmax(-1)
        nexts = torch.tensor(
            [[text[1 - left]] for text in texts], device=logprobs_RV.device
        )
        steps.append(logprobs_RV.gather(1, nexts)[:, 0])
    return torch.stack(steps)


def _own_logprobs(model: torch.nn.Module, text: np.ndarray) -> Tensor:
    ids = torch.from_numpy(text)[None].to(next(model.parameters()).device)
    logprobs_TV = (
        model(ids, use_cache=False).logits[0, -DECODED:-1].float().log_softmax(-1)
    )
    return logprobs_TV.gather(1, ids[0, 1 - DECODED :, None])[:, 0]
