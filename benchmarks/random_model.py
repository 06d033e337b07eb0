"""Models of random weights, of the size that a benchmark needs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.trainer.model.random_init import make_character_tokenizer


def random_qwen3(folder: Path, **sizes: int) -> Qwen3ForCausalLM:
    """Saved in `folder` too: with tied embeddings and no end token, so that every request gets its length.
    `sizes`: fields of Qwen3Config.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=0
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def qwen3_69m(folder: Path, max_length: int) -> Qwen3ForCausalLM:
    """69 M parameters: 277 MB in float32."""
    return random_qwen3(
        folder,
        vocab_size=16_384,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=max_length,
    )


def llama_135m(folder: Path) -> Path:
    """Save a random model of 134.5 M parameters and a tokenizer under `folder`; return their folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    make_character_tokenizer("ab").save_pretrained(folder / "model")
    return folder / "model"
