"""Facts about a kind of engines. Settings and placement read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple


class EngineCapabilities(NamedTuple):
    """Facts about an engine kind. `title`: its name in texts. `settings`: keys of
    `rollout` that only this kind reads.
    """

    title: str = ""
    settings: tuple[str, ...] = ()
    has_model: bool = True
    package: str | None = None
    """Package in the servers' own Python: rollout.{package}_python, which judges use,
    too.
    """
    installation: str = ""
    """Commands that install the package."""
    split_key: str | None = None
    """Key of `rollout` with the devices that one engine spans; None: always one."""
    urls_key: str | None = None
    """Key of `rollout` with servers that others have started; None: the run starts all.
    """
    arguments_key: str | None = None
    """Key of `rollout` with the server's own arguments by name."""
    memory_arguments: tuple[str, ...] = ()
    """Of these arguments, the ones that fix how much memory an engine takes."""
    is_own_argument: Callable[[str], bool] = lambda _: False
    """Whether the run sets an argument of this name itself."""
    key_env: str = ""
    """Environment variable with the key of servers that others have started."""
    receives_transfers: bool = False
    """Weights may be sent from device to device."""
    keeps_quantized: bool = False
    """Does not dequantise a quantised model."""
    opens_chunks: bool = True
    stages_weights: bool = True
    """On separate devices, it holds two sets of weights."""
    sleeps_on_cpu: bool = True
    """When colocated, it can free its memory on a CPU."""
    keeps_asleep: bool = False
    """A server of another role, of this kind, keeps its weights while it sleeps."""
    pins_length: bool = False
    """Its maximum length decides length-dependent rotary frequencies, not each
    sequence's.
    """
    keeps_turns: bool = False
    """A second KV cache for agent conversations is available."""
    returns_routing: bool = False
    reports_supports: bool = False
    """Reports the tokens from which top_p, top_k and min_p let a token be drawn."""
    scores_texts: bool = False
    """A server of its kind can report the logprobs of given tokens."""
    exact_on: Literal["cpu", "cuda", "nothing"] = "nothing"
    """Kind of device that supports rollout.deterministic."""
    auto_slots: int = 64
    """Most slots with rollout.slots=auto."""
    pages_kv: bool = False
    """On CUDA, sequences wait for a full KV cache."""
    kv_block: int = 1
    forward_tokens: int = 0
    logit_copies: int = 0
    """Float32 arrays of vocabulary size per slot in a step."""

    def kv_length(self, length: int) -> int:
        # Rounded up: an engine reserves whole blocks, also for the last tokens.
        return -(-length // self.kv_block) * self.kv_block
