"""Waits until a vLLM server answers, and sees that it is what the run counts on. Knows routes and settings; starts nothing."""

from __future__ import annotations

import asyncio

from asyncrl.calling import CallGarbled, CallLost, CallRefused
from asyncrl.engines.vllm.canary import warm_up
from asyncrl.engines.vllm.facts import EXTENSION, VllmFacts, check_settings, check_workers, lacks
from asyncrl.engines.vllm.process import START_LABEL, Process
from asyncrl.engines.vllm.routes import Routes
from asyncrl.errors import ConfigError

_ASK_AGAIN_S = 0.2


async def make_ready(process: Process, routes: Routes, facts: VllmFacts, *, is_first: bool) -> None:
    """Returns once it serves as it must; its limit is the caller's. Raises ConfigError, EngineError, CallRefused or CallLost.

    `is_first`: nobody of this run has pushed weights there, so what it has must be what it was started with.
    """
    name = process.name
    try:
        await _until_up(routes)
    except CallRefused as refusal:
        if refusal.status != 401:
            raise
        raise ConfigError(
            f"{name}: the vLLM server there does not take the key ({refusal.body.error})",
            rule="a server of somebody else has a key of its own",
            way_out="put that key into the environment variable ASYNCRL_VLLM_KEY.",
        ) from refusal
    try:
        info = await routes.server_info(timeout_s=None)
    except CallRefused as refusal:
        raise _maybe(
            refusal, lacks(name, "has no /server_info", "weights are pushed through such routes", "VLLM_SERVER_DEV_MODE=1")
        ) from refusal
    check_settings(name, info, facts)
    try:
        workers = await routes.rpc("asyncrl_facts")
        check_workers(name, workers)
    except CallRefused as refusal:
        raise lacks(name, f"has no worker extension of ours ({refusal.body.error})", "it loads the weights and says their digest",
                    f"--worker-extension-cls {EXTENSION}") from refusal  # fmt: skip
    process.vocab_size = min(int(worker["vocab_size"]) for worker in workers)
    label, ours = await routes.label(), process.label_of(process.version)
    if is_first and label not in (START_LABEL, ours):
        raise ConfigError(
            f"{name}: the vLLM server there has weights that another run pushed, under the label {label}",
            rule=f"a run begins with the weights of model.path, as policy_version {process.version}", way_out="start that server again.",
        )  # fmt: skip
    await routes.resume()  # whoever paused it last may have been killed
    await routes.set_label(ours)
    process.label = ours
    try:
        await warm_up(routes, label=ours, request_id=f"warm-up-{name}")
    except CallRefused as refusal:
        raise _maybe(
            refusal, lacks(name, "has no /inference/v1/generate", "tokens go in and come out as ids", "--enable-scale-out")
        ) from refusal


async def _until_up(routes: Routes) -> None:
    """A server that we started has a socket from the first moment; one of somebody else's may refuse connections for a while."""
    while True:
        try:
            return await routes.is_well(timeout_s=None)
        except CallGarbled:
            raise
        except CallLost:
            await asyncio.sleep(_ASK_AGAIN_S)


def _maybe(refusal: CallRefused, missing: ConfigError) -> ConfigError | CallRefused:
    """403 and 404 are of a route that is not there."""
    return missing if refusal.status in (403, 404) else refusal
