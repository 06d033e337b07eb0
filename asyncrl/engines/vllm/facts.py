"""What a vLLM server must be for this run, held against what it says of itself. Pure: knows settings; asks
nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.engines.vllm.vllm_routes import ServerInfo
from asyncrl.errors import ConfigError
from asyncrl.messages.engine_calls import GenerateRequest

EXTENSION = "asyncrl_servers.vllm.worker_extension.WeightLoader"
_MIN_KEEP_ALIVE_S = 60
"""Our connections rest for 30 s (calling.Caller); a server that closes one first breaks the next request on
it.
"""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """What the run counts on.

    `end_ids`: tokens that end a completion; vLLM is told to heed no others. `special_ids`: tokens that have
    no text, by their name: a stop string that is such a name stops at that token. `starts_fresh`: it has the
    weights of the start; False: it is somebody else's, and its weights are replaced before anything is
    sampled.
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
    model, scheduler = _section(info, "model_config"), _section(info, "scheduler_config")
    served, dtype = str(model.get("model")), str(model.get("dtype")).removeprefix("torch.")
    keep_alive_s = info.vllm_env.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    _require(
        name,
        "logprobs_mode",
        model.get("logprobs_mode"),
        model.get("logprobs_mode") == "processed_logprobs",
        "the trainer needs the logprobs of the distribution that was sampled from, temperature and top_p "
        "applied",
        "--logprobs-mode processed_logprobs",
    )
    _require(
        name,
        "model",
        served,
        os.path.realpath(served) == os.path.realpath(facts.model_path),
        f"it must serve the model that is trained, {facts.model_path}",
        f"vllm serve {facts.model_path}",
    )
    _require(
        name,
        "dtype",
        dtype,
        dtype == facts.dtype,
        f"weights are published as {facts.dtype}",
        f"--dtype {facts.dtype}",
    )
    _require(
        name,
        "max_model_len",
        model.get("max_model_len"),
        _at_least(model.get("max_model_len"), facts.max_length),
        f"prompt and completion take up to {facts.max_length} tokens",
        f"--max-model-len {facts.max_length}",
    )
    _require(
        name,
        "max_num_seqs",
        scheduler.get("max_num_seqs"),
        _at_least(scheduler.get("max_num_seqs"), facts.slots),
        f"rollout.slots={facts.slots} requests are to run at once",
        f"--max-num-seqs {facts.slots}",
    )
    _require(
        name,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        keep_alive_s,
        keep_alive_s is None or _at_least(keep_alive_s, _MIN_KEEP_ALIVE_S),
        "a connection that the server closes while it rests breaks the next request on it",
        f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE={_MIN_KEEP_ALIVE_S} or more in its environment",
    )
    if facts.has_adapters:
        _require(
            name,
            "lora_config",
            info.vllm_config.get("lora_config"),
            info.vllm_config.get("lora_config") is not None,
            "weight_sync.transport=lora brings adapters",
            "--enable-lora and a --max-lora-rank of trainer.lora.rank or more",
        )
        _require(
            name,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            info.vllm_env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
            info.vllm_env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") is not False,
            "weight_sync.transport=lora brings adapters while it serves",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment",
        )


def check_workers(name: str, workers: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if not every worker answers as our extension does."""
    for worker in workers:
        _require(
            name,
            "worker extension",
            worker.get("extension"),
            worker.get("extension") == 1,
            "our extension loads the weights and says their digest",
            f"--worker-extension-cls {EXTENSION}",
        )


def lacks(name: str, what: str, rule: str, give: str) -> ConfigError:
    """A vLLM server that was started without something."""
    return ConfigError(f"{name}: the vLLM server there {what}", rule=rule, way_out=f"start it with {give}.")


def _section(info: ServerInfo, key: str) -> Mapping[str, Any]:
    section = info.vllm_config.get(key)
    return section if isinstance(section, dict) else {}


def _at_least(found: object, least: int) -> bool:
    return isinstance(found, int | float) and found >= least


def _require(name: str, setting: str, found: object, is_so: bool, rule: str, give: str) -> None:
    if not is_so:
        raise lacks(name, f"has {setting}={found}", rule, give)


# Stop strings that lie over the joint of a resumed segment: vLLM looks at new text alone. Knows a decoder;
# knows no request.


_SLACK = 8
"""Tokens looked at beyond the longest stop string's bytes (each token holds a byte or more, but for special
ones).
"""


class JointWatch:
    """Tells which of the first new tokens completes a stop string that began before them.

    Life: made with the resumed ids -> take() for the new ones, in order -> is_over: no stop string reaches
    back so far any more.
    """

    def __init__(
        self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], resumed_ids: Sequence[int]
    ) -> None:
        self._stop = [text for text in stop if text]
        self._decode = decode
        self._window = max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        self._tail = list(resumed_ids[-self._window :])
        self._num_taken = 0

    @property
    def is_over(self) -> bool:
        """The tokens to come are vLLM's to watch."""
        return self._num_taken >= self._window

    def take(self, token_ids: Sequence[int]) -> int | None:
        """Number of these that are left when the one that completes a stop string is the last; None if none
        does.
        """
        for index, token_id in enumerate(token_ids):
            if self.is_over:
                return None
            self._tail.append(token_id)
            self._num_taken += 1
            text = self._decode(self._tail)
            if any(stop in text for stop in self._stop):
                return index + 1
        return None


def watch_of(request: GenerateRequest, decode: Callable[[Sequence[int]], str] | None) -> JointWatch | None:
    """A watch, where the segment has a joint that a stop string can lie over, and its text can be read."""
    if decode is None or not request.num_resumed or not any(request.stop):
        return None
    return JointWatch(request.stop, decode, request.prompt_ids[-request.num_resumed :])
