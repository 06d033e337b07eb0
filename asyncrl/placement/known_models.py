"""What config.json of well-known models says about their size, for plans without the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

_LLAMA = {"model_type": "llama", "vocab_size": 128_256}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 151_936}
_QWEN2_LARGE = {**_QWEN2, "vocab_size": 152_064}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936}
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49_152}

# name, published parameters, family, whether embedding and head are one tensor, sizes
_ROWS = (
    ("HuggingFaceTB/SmolLM2-135M", 134_515_008, _SMOLLM2, True, (576, 1536, 30, 9, 3, 64)),
    ("HuggingFaceTB/SmolLM2-360M", 361_821_120, _SMOLLM2, True, (960, 2560, 32, 15, 5, 64)),
    ("HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384, _SMOLLM2, True, (2048, 8192, 24, 32, 32, 64)),
    ("Qwen/Qwen2.5-0.5B", 494_032_768, _QWEN2, True, (896, 4864, 24, 14, 2, 64)),
    ("Qwen/Qwen2.5-1.5B", 1_543_714_304, _QWEN2, True, (1536, 8960, 28, 12, 2, 128)),
    ("Qwen/Qwen2.5-3B", 3_085_938_688, _QWEN2, True, (2048, 11_008, 36, 16, 2, 128)),
    ("Qwen/Qwen2.5-7B", 7_615_616_512, _QWEN2_LARGE, False, (3584, 18_944, 28, 28, 4, 128)),
    ("Qwen/Qwen3-0.6B", 596_049_920, _QWEN3, True, (1024, 3072, 28, 16, 8, 128)),
    ("Qwen/Qwen3-1.7B", 1_720_574_976, _QWEN3, True, (2048, 6144, 28, 16, 8, 128)),
    ("Qwen/Qwen3-4B", 4_022_468_096, _QWEN3, True, (2560, 9728, 36, 32, 8, 128)),
    ("Qwen/Qwen3-8B", 8_190_735_360, _QWEN3, False, (4096, 12_288, 36, 32, 8, 128)),
    ("meta-llama/Llama-3.2-1B", 1_235_814_400, _LLAMA, True, (2048, 8192, 16, 32, 8, 64)),
    ("meta-llama/Llama-3.2-3B", 3_212_749_824, _LLAMA, True, (3072, 8192, 28, 24, 8, 128)),
    ("meta-llama/Llama-3.1-8B", 8_030_261_248, _LLAMA, False, (4096, 14_336, 32, 32, 8, 128)),
)


def _architectures() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, _, family, is_tied, sizes in _ROWS:
        architecture = {**family, "tie_word_embeddings": is_tied, **dict(zip(_SIZES, sizes, strict=True))}
        yield name, architecture
        yield f"{name}{'-Base' if family is _QWEN3 else '-Instruct'}", architecture


ARCHITECTURES: Mapping[str, Mapping[str, Any]] = dict(_architectures())
"""Size keys of config.json, by hub id. Base and instruct models share their architecture."""

PUBLISHED_PARAMETERS: Mapping[str, int] = {row[0]: row[1] for row in _ROWS}
"""Published number of parameters, by hub id; a tied embedding counts once."""
