"""Puts an engine together from its spec. Knows all the parts; ends the process if one cannot work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.serving import Refused
from asyncrl_servers.embedded.canary import check_determinism, check_same_model
from asyncrl_servers.embedded.engine import Engine
from asyncrl_servers.embedded.lora import linear_parameters
from asyncrl_servers.embedded.memory import available_bytes, check_memory
from asyncrl_servers.embedded.model import READ_ERRORS, LoadedModel, load_model, read_parameters
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.embedded.spec import EmbeddedSpec
from asyncrl_servers.embedded.weights import Weights


def build_engine(spec: EmbeddedSpec, on_crash: Callable[[BaseException | None], None] = lambda _: None) -> Engine:
    """A loaded and checked engine, not started yet. Prints an ErrorBody line and raises SystemExit(1) if it cannot work."""
    torch.set_num_threads(spec.threads)
    loaded = load_model(spec)
    weight_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
    # A swap on CUDA is a copy in place, with the old weights kept until it is verified.
    staged_bytes = weight_bytes * (2 if loaded.device.type == "cuda" else 1)
    if spec.has_adapters:  # the weights of the start stay beside what is merged over them
        linear = linear_parameters(loaded.model)
        staged_bytes += sum(parameter.nbytes for name, parameter in loaded.model.named_parameters() if name in linear)
    plan = check_memory(spec, loaded.shape, loaded.dtype.itemsize, loaded.vocab_size, staged_bytes, available_bytes(loaded.device))
    # CUDA kernels are chosen by size, so the promise is kept and checked on CPU alone.
    is_exact = spec.deterministic and loaded.device.type == "cpu"
    runner = Runner(loaded, spec.slots, spec.max_length, is_exact=is_exact, prompt_cache_bytes=plan.prompt_cache)
    check_same_model(runner, spec.name)
    if is_exact:
        check_determinism(runner, spec.name, spec.slots)
    runner.num_prefilled = 0
    return Engine(
        runner,
        Weights(loaded.model, spec.start_version, read_start=lambda: _read_start(spec, loaded), has_adapters=spec.has_adapters),
        name=spec.name,
        slots=spec.slots,
        max_length=spec.max_length,
        max_queued=spec.max_queued,
        threads=spec.threads,
        spare_path=spec.spare_path,
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
