"""Asks a vLLM server for the logprobs of a short text, and holds them against the trainer's. Knows numbers;
decides nothing.
"""

from __future__ import annotations

import asyncio
import math

from asyncrl.engines.vllm.facts import EXTENSION, VllmFacts, check_settings, check_workers, lacks
from asyncrl.engines.vllm.segments import salt_of
from asyncrl.engines.vllm.vllm_process import START_LABEL, Process
from asyncrl.engines.vllm.vllm_routes import Generate, Generated, Routes, Sampling
from asyncrl.errors import ConfigError
from asyncrl.http import CallGarbled, CallLost, CallRefused
from asyncrl.messages.trainer_calls import Canary

# Waits until a vLLM server answers, and sees that it is what the run counts on. Knows routes and settings;
# starts nothing.


_ASK_AGAIN_S = 0.2


async def make_ready(process: Process, routes: Routes, facts: VllmFacts, *, is_first: bool) -> None:
    """Returns once it serves as it must; its limit is the caller's. Raises ConfigError, EngineError,
    CallRefused or CallLost.

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
            refusal,
            lacks(
                name,
                "has no /server_info",
                "weights are pushed through such routes",
                "VLLM_SERVER_DEV_MODE=1",
            ),
        ) from refusal
    check_settings(name, info, facts)
    try:
        workers = await routes.rpc("asyncrl_facts")
        check_workers(name, workers)
    except CallRefused as refusal:
        raise lacks(
            name,
            f"has no worker extension of ours ({refusal.body.error})",
            "it loads the weights and says their digest",
            f"--worker-extension-cls {EXTENSION}",
        ) from refusal
    process.vocab_size = min(int(worker["vocab_size"]) for worker in workers)
    label, ours = await routes.label(), process.label_of(process.version)
    if is_first and label not in (START_LABEL, ours):
        raise ConfigError(
            f"{name}: the vLLM server there has weights that another run pushed, under the label {label}",
            rule=f"a run begins with the weights of model.path, as policy_version {process.version}",
            way_out="start that server again.",
        )
    await routes.resume()  # whoever paused it last may have been killed
    await routes.set_label(ours)
    process.label = ours
    try:
        await warm_up(routes, label=ours, request_id=f"warm-up-{name}")
    except CallRefused as refusal:
        raise _maybe(
            refusal,
            lacks(
                name,
                "has no /inference/v1/generate",
                "tokens go in and come out as ids",
                "--enable-scale-out",
            ),
        ) from refusal


async def _until_up(routes: Routes) -> None:
    """A server that we started has a socket from the first moment; one of somebody else's may refuse
    connections for a while.
    """
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


async def canary_fault(
    routes: Routes, canary: Canary, *, label: str, model: str | None, limit: float, request_id: str
) -> str:
    """What vLLM says of the canary that the trainer does not, in words; '' if they agree. Raises CallRefused
    or CallLost.

    The first probe goes the way of every request, through the prefix cache; the second computes the prompt
    anew.
    """
    probes = [
        _probe(canary.token_ids, label, model, f"{request_id}-{name}", name == "prompt")
        for name in ("next", "prompt")
    ]
    answers = [
        await routes.generate(probe) for probe in probes
    ]  # one after the other: the second would fill the cache for the first
    return next(filter(None, (_label_fault(answer, label) for answer in answers)), "") or "; ".join(
        filter(None, (_next_fault(answers[0], canary, limit), _prompt_fault(answers[1], canary, limit)))
    )


async def warm_up(routes: Routes, *, label: str, request_id: str) -> None:
    """Have vLLM do once what it compiles at the first time: sampling with a seed, logprobs, and those of a
    prompt.
    """
    for is_prompt in (False, True):
        await routes.generate(_probe([1, 2, 3], label, None, f"{request_id}-{is_prompt}", is_prompt))
    sampling = Sampling(max_tokens=2, temperature=0.7, top_p=0.9, seed=1)
    await routes.generate(
        Generate(
            token_ids=[1, 2, 3], request_id=request_id, cache_salt=salt_of(label), sampling_params=sampling
        )
    )


def _probe(token_ids: list[int], label: str, model: str | None, request_id: str, is_prompt: bool) -> Generate:
    sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0 if is_prompt else None)
    return Generate(
        token_ids=token_ids,
        request_id=request_id,
        cache_salt=salt_of(label),
        sampling_params=sampling,
        model=model,
    )


def _label_fault(answer: Generated, label: str) -> str:
    labels = [span.version for choice in answer.choices for span in choice.weight_versions or []]
    return (
        ""
        if labels == [label]
        else f"it answers under the label {', '.join(labels) or 'none'}, and was told {label}"
    )


def _next_fault(answer: Generated, canary: Canary, limit: float) -> str:
    content = [
        one.logprob for choice in answer.choices if choice.logprobs for one in choice.logprobs.content or []
    ]
    if len(content) != 1:
        return f"{len(content)} logprobs of one next token"
    gap = abs(content[0] - canary.next_logprob)
    return (
        ""
        if gap <= limit
        else f"the next token has logprob {content[0]:.6f}, the trainer says {canary.next_logprob:.6f}"
    )


def _prompt_fault(answer: Generated, canary: Canary, limit: float) -> str:
    entries = (answer.prompt_logprobs or [])[1:]
    found = [
        entry[token].logprob
        for entry, token in zip(entries, canary.token_ids[1:], strict=False)
        if entry and token in entry
    ]
    if len(found) != len(canary.logprobs):
        return f"{len(found)} logprobs of a prompt with {len(canary.logprobs)}"
    gap = math.fsum(abs(ours - theirs) for ours, theirs in zip(found, canary.logprobs, strict=True)) / len(
        found
    )
    return (
        ""
        if gap <= limit
        else f"logprobs of the prompt differ by {gap:.6f} on average over {len(found)} tokens"
    )
