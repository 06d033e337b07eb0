"""Engine servers of vLLM."""

from asyncrl.base.extensions import AddedEngine, Extension

EXTENSION = Extension(
    about="Engine servers of vLLM.",
    page="docs/engines.md",
    extra="vllm",
    fields={"rollout": "asyncrl.extensions.vllm.settings:FIELDS"},
    engines={
        "vllm": AddedEngine(
            "asyncrl.extensions.vllm.settings:FACTS",
            "asyncrl.extensions.vllm.vllm_maker:MAKER",
        )
    },
)
