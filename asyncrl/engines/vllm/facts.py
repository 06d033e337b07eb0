"""What a vLLM server must be for this run, and the wait until one is. Starts nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from asyncrl.engines.vllm.vllm_process import START_LABEL, VllmProcess
from asyncrl.engines.vllm.vllm_routes import GENERATE, LabelInfo, Said, ServerInfo, vllm_request
from asyncrl.errors import ConfigError
from asyncrl.http import CallGarbled, CallLost, CallRefused

EXTENSION = "asyncrl_servers.vllm.worker_extension.WeightLoader"
_LOGPROBS = "processed_logprobs"
_KEEP_ALIVE, _LORA_UPDATING = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_RULE = (
    "the run needs its model and dtype, slots for its requests, logprobs of sampled tokens, idle "
    "connections that stay open, and with transport=lora adapters that can be loaded while it serves"
)
_ASK_AGAIN_S = 0.2
_MIN_KEEP_ALIVE_S = 60
"""Our connections rest for 30 s (http.Caller); a server that closes one first breaks the next request on it.
"""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """What the run counts on.

    `end_ids`: tokens that end a completion; vLLM is told to heed no others. `special_ids`: tokens that have
    no text, by their name: a stop string that is such a name stops at that token. `starts_fresh`: it has the
    initial weights; False: the run did not start it, and its weights are replaced before anything is sampled.
    """

    model_path: str
    dtype: str
    slots: int
    max_length: int
    end_ids: tuple[int, ...]
    has_adapters: bool
    device: str
    special_ids: Mapping[str, int] = field(default_factory=dict)
    starts_fresh: bool = True


def check_settings(name: str, info: ServerInfo, facts: VllmFacts) -> None:
    """Raise ConfigError with the flag that vLLM needs, if its settings are not what the run counts on."""
    config, env = info.vllm_config, info.vllm_env
    model, scheduler = config.get("model_config") or {}, config.get("scheduler_config") or {}
    path, dtype = str(model.get("model")), str(model.get("dtype")).removeprefix("torch.")
    is_path = os.path.realpath(path) == os.path.realpath(facts.model_path)
    mode, length = model.get("logprobs_mode"), model.get("max_model_len")
    num_seqs, keep_alive_s = scheduler.get("max_num_seqs"), env.get(_KEEP_ALIVE)
    lora, is_updating, is_lora = config.get("lora_config"), env.get(_LORA_UPDATING), facts.has_adapters
    is_resting = keep_alive_s is None or _at_least(keep_alive_s, _MIN_KEEP_ALIVE_S)
    for setting, found, is_so, flag in (
        ("logprobs_mode", mode, mode == _LOGPROBS, f"--logprobs-mode {_LOGPROBS}"),
        ("model", path, is_path, f"vllm serve {facts.model_path}"),
        ("dtype", dtype, dtype == facts.dtype, f"--dtype {facts.dtype}"),
        ("max_model_len", length, _at_least(length, facts.max_length), f"--max-model-len {facts.max_length}"),
        ("max_num_seqs", num_seqs, _at_least(num_seqs, facts.slots), f"--max-num-seqs {facts.slots}"),
        (_KEEP_ALIVE, keep_alive_s, is_resting, f"{_KEEP_ALIVE}={_MIN_KEEP_ALIVE_S} or more set"),
        ("lora_config", lora, lora is not None or not is_lora, "--enable-lora and --max-lora-rank"),
        (_LORA_UPDATING, is_updating, is_updating is not False or not is_lora, f"{_LORA_UPDATING}=1 set"),
    ):
        if not is_so:
            raise ConfigError(
                f"{name}: the vLLM server there has {setting}={found}",
                rule=_RULE,
                way_out=f"start it with {flag}.",
            )


def _at_least(found: object, least: int) -> bool:
    return isinstance(found, int | float) and found >= least


async def make_ready(process: VllmProcess, facts: VllmFacts, *, is_first: bool) -> None:
    """Returns once it serves as it must; its limit is the caller's. Raises ConfigError, CallRefused or
    CallLost.

    `is_first`: this run has not pushed weights there yet, so it must have the weights of its start.
    """
    there = f"{process.name}: the vLLM server there"
    with _refusal_means(
        f"{there} does not take the key",
        "a server that the run did not start has a key of its own",
        "put that key into the environment variable ASYNCRL_VLLM_KEY.",
        401,
    ):
        await _until_up(process)
    rule = "weights are pushed through such routes"
    with _refusal_means(
        f"{there} has no /server_info", rule, "start it with VLLM_SERVER_DEV_MODE=1.", 403, 404
    ):
        info = await process.get("/server_info?config_format=json", ServerInfo)
    check_settings(process.name, info, facts)
    rule, flag = "it loads the weights and says their digest", f"--worker-extension-cls {EXTENSION}"
    with _refusal_means(f"{there} has no worker extension of ours", rule, f"start it with {flag}."):
        workers = await process.rpc("asyncrl_facts")
    process.vocab_size = min(int(worker["vocab_size"]) for worker in workers)
    ours = process.label_of(process.version)
    label = (await process.get("/weight_info", LabelInfo)).weight_version
    if is_first and label not in (START_LABEL, ours):
        raise ConfigError(
            f"{there} has weights that another run pushed, under the label {label}",
            rule=f"a run begins with the weights of model.path, as policy_version {process.version}",
            way_out="start that server again.",
        )
    await process.tell("/resume")  # the run that paused it last may have been killed
    await process.set_label(ours)
    process.label = ours
    rule = "tokens go in and come out as ids"
    with _refusal_means(f"{there} has no {GENERATE}", rule, "start it with --enable-scale-out.", 403, 404):
        await _warm_up(process, ours)


@contextlib.contextmanager
def _refusal_means(what: str, rule: str, way_out: str, *statuses: int) -> Iterator[None]:
    """A refusal with one of these statuses (none: any) is a ConfigError; a missing route has 403 or 404."""
    try:
        yield
    except CallRefused as refusal:
        if statuses and refusal.status not in statuses:
            raise
        raise ConfigError(f"{what} ({refusal.body.error})", rule=rule, way_out=way_out) from refusal


async def _until_up(process: VllmProcess) -> None:
    """A server that we started has a socket from the first moment; one that the run did not start may refuse
    connections for a while.
    """
    while True:
        try:
            await process.get("/health", Said)
        except CallGarbled:
            raise
        except CallLost:
            await asyncio.sleep(_ASK_AGAIN_S)
        else:
            return


async def _warm_up(process: VllmProcess, label: str) -> None:
    """Have vLLM do once what it compiles at the first time: sampling with a seed, logprobs, and those of a
    prompt.
    """
    greedy = {"max_tokens": 1, "temperature": 0.0}
    seeded = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1}
    for number, sampling in enumerate((greedy, greedy | {"prompt_logprobs": 0}, seeded)):
        await process.tell(GENERATE, vllm_request([1, 2, 3], f"warm-up-{number}", label, None, **sampling))
