"""Facts about each kind of engine, and the settings that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    EngineKind = str
else:
    EngineKind = Literal["embedded", "vllm", "simulated"]


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Facts about an engine kind. `settings`: keys of `rollout` that only this kind
    reads.
    """

    settings: tuple[str, ...] = ()
    has_model: bool = True
    free_settings: tuple[str, ...] = ()
    package: str | None = None
    """Package in the servers' own Python: rollout.{package}_python, which judges use,
    too.
    """
    split_key: str | None = None
    """Key of `rollout` with the devices that one engine spans; None: always one."""
    urls_key: str | None = None
    """Key of `rollout` with servers that others have started; None: the run starts all.
    """
    arguments_key: str | None = None
    """Key of `rollout` with the server's own arguments by name."""
    memory_arguments: tuple[str, ...] = ()
    """Of these arguments, the ones that fix how much memory an engine takes."""
    key_env: str = ""
    """Environment variable with the key of servers that others have started."""
    receives_transfers: bool = False
    """Weights may be sent from device to device."""
    adds_adapters: bool = False
    """Computes W x + B A x, where the trainer merges and rounds. The two differ in
    bfloat16.
    """
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
    pages_kv: bool = False
    """On CUDA, sequences wait for a full KV cache."""
    kv_block: int = 1
    forward_tokens: int = 0
    logit_copies: int = 0
    """Float32 arrays of vocabulary size per slot in a step."""

    def kv_length(self, length: int) -> int:
        # Rounded up: an engine reserves whole blocks, also for the last tokens.
        return -(-length // self.kv_block) * self.kv_block


ENGINES: dict[EngineKind, EngineCapabilities] = {
    "embedded": EngineCapabilities(
        settings=("fused_decode",),
        free_settings=("fused_decode",),
        receives_transfers=True,
        keeps_asleep=True,
        keeps_turns=True,
        scores_texts=True,
        returns_routing=True,
        reports_supports=True,
        exact_on="cpu",
        kv_block=32,
        forward_tokens=1024,
        logit_copies=7,
    ),
    "simulated": EngineCapabilities(settings=("simulated",), has_model=False),
    "vllm": EngineCapabilities(
        settings=("vllm", "urls", "tensor_parallel"),
        free_settings=("vllm_python", "urls", "tensor_parallel"),
        package="vllm",
        split_key="tensor_parallel",
        urls_key="urls",
        arguments_key="vllm",
        memory_arguments=("gpu_memory_utilization", "num_gpu_blocks_override"),
        key_env="ASYNCRL_VLLM_KEY",
        pins_length=True,
        returns_routing=True,
        reports_supports=True,
        scores_texts=True,
        receives_transfers=True,
        adds_adapters=True,
        opens_chunks=False,
        stages_weights=False,
        sleeps_on_cpu=False,
        exact_on="cuda",
        pages_kv=True,
        kv_block=128,
        forward_tokens=8192,
        logit_copies=3,
    ),
}

VLLM_OWN = frozenset(
    """model model_tag tokenizer skip_tokenizer_init served_model_name dtype seed config help
    generation_config override_generation_config logprobs_mode max_logprobs structured_outputs_config
    reasoning_parser reasoning_parser_plugin max_model_len max_num_seqs tensor_parallel_size
    data_parallel_size api_server_count headless host port uds root_path ssl_keyfile ssl_certfile api_key
    middleware grpc enable_scale_out tokens_only worker_extension_cls weight_transfer_config enable_lora
    max_lora_rank max_loras return_sampling_mask enable_return_routed_experts aux_output_config
    disable_uvicorn_access_log
    disable_fastapi_docs""".split()
)
"""vLLM's arguments that the run sets itself."""


def is_own_of_vllm(name: str) -> bool:
    """Return whether the run sets this argument of vLLM, in any of its spellings."""
    flag = name.lstrip("-").replace("-", "_").partition(".")[0]
    return flag.removesuffix("+").removeprefix("no_") in VLLM_OWN
