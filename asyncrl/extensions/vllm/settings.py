"""Settings of vLLM engines, and the facts about their kind."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from asyncrl.base.errors import install_extra
from asyncrl.base.extensions import AddedField
from asyncrl.config.engine_facts import EngineCapabilities
from asyncrl.config.fields import Count

Urls = list[Annotated[str, Field(pattern=r"^https?://[^/?#\s]+$")]] | None

ARGUMENTS = AddedField[dict[str, object]](
    "vllm",
    dict[str, object],
    "Arguments of `vllm serve` by name, except those that the run sets itself.",
    {},
)
PYTHON = AddedField(
    "vllm_python",
    str,
    "Python with vLLM, for rollout engines and a judge (auto = this one, else "
    ".venv-vllm/bin/python of the checkout).",
    "auto",
    is_free=True,
)
URLS = AddedField(
    "urls",
    Urls,
    "URLs of num_engines vLLM servers, with their key in ASYNCRL_VLLM_KEY (none = the "
    "run starts its own).",
    None,
    is_free=True,
)
TENSOR_PARALLEL = AddedField(
    "tensor_parallel", Count, "Devices per vLLM engine.", 1, is_free=True
)
FIELDS = (ARGUMENTS, PYTHON, URLS, TENSOR_PARALLEL)

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


FACTS = EngineCapabilities(
    title="vLLM",
    settings=("vllm", "urls", "tensor_parallel"),
    package="vllm",
    installation=f"{install_extra('vllm')} (CUDA), or `make setup-vllm` (CPU)",
    split_key="tensor_parallel",
    urls_key="urls",
    arguments_key="vllm",
    memory_arguments=("gpu_memory_utilization", "num_gpu_blocks_override"),
    is_own_argument=is_own_of_vllm,
    key_env="ASYNCRL_VLLM_KEY",
    pins_length=True,
    returns_routing=True,
    reports_supports=True,
    scores_texts=True,
    receives_transfers=True,
    keeps_quantized=True,
    opens_chunks=False,
    stages_weights=False,
    sleeps_on_cpu=False,
    exact_on="cuda",
    auto_slots=256,
    pages_kv=True,
    kv_block=128,
    forward_tokens=8192,
    logit_copies=3,
)
