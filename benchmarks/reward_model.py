"""Tokens per second of the reward model's server, next to plain `transformers` batches.

    python benchmarks/reward_model.py [--seconds 30] [--write]

A random Qwen3 with 2.4 million parameters scores texts with a lognormal length (mean about 180
tokens, 1,000 at most) on one thread, in float32. Both sides tokenize the same chats and
score the same texts; they alternate, so that both see the same machine.

server    64 calls at once, over HTTP, in batches of at most 8,192 tokens.
plain     batches of 16 texts in the given order, padded by the tokenizer.
sorted    batches of 16 texts, sorted within each 64: a plain loop that knows lengths.

Target: server >= 0.9 of the faster plain loop. Last line: `ratio: X` = server / faster plain loop.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import START_S, child_server, options, printable_tokenizer, reported
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from asyncrl.extensions.scoring.reward_client import RewardModelClient
from asyncrl.extensions.scoring.reward_model_config import (
    REWARD_BATCH_TOKENS,
    REWARD_PLACES,
    RewardModelConfig,
)
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.records import Prompt

BATCH = 16
QUESTION = "Which of the two is larger, and why?"


def make_model(folder: Path) -> Path:
    path = printable_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    return path


def draw_texts(num: int) -> list[str]:
    draw = random.Random(0)
    lengths = [min(900, int(draw.lognormvariate(4.6, 0.8)) + 4) for _ in range(num)]
    return ["".join(draw.choices("abcdefgh ", k=length)) for length in lengths]


class Plain:
    def __init__(self, path: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model = AutoModelForSequenceClassification.from_pretrained(path)
        self._model: Any = model.eval()

    def scores(self, texts: list[str], *, is_sorted: bool) -> list[float]:
        order = list(range(len(texts)))
        if is_sorted:
            order = [
                index
                for start in range(0, len(texts), REWARD_PLACES)
                for index in sorted(
                    order[start : start + REWARD_PLACES],
                    key=lambda index: len(texts[index]),
                )
            ]
        found = dict[int, float]()
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            chats = [
                [
                    {"role": "user", "content": QUESTION},
                    {"role": "assistant", "content": texts[index]},
                ]
                for index in batch
            ]
            encoded = self._tokenizer.apply_chat_template(
                chats,
                return_dict=True,
                return_tensors="pt",
                padding=True,
                tokenizer_kwargs={"padding_side": "right"},
            )
            with torch.inference_mode():
                logits = self._model(**encoded).logits[:, 0].tolist()
            found |= dict(zip(batch, logits, strict=True))
        return [found[index] for index in range(len(texts))]


async def measure(folder: Path, seconds: float) -> float:
    path = make_model(folder)
    plain = Plain(path)
    texts = draw_texts(REWARD_PLACES)
    spec = {
        "model_path": str(path),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "reads": "chat",
        "label": 0,
        "batch_tokens": REWARD_BATCH_TOKENS,
    }
    prompt = Prompt("0/0", ({"role": "user", "content": QUESTION},))
    spent_s = dict.fromkeys(("server", "plain", "sorted"), 0.0)
    rounds = 0
    serving = child_server(
        "reward", "asyncrl_servers.scoring.reward_model", spec, folder
    )
    async with serving as (_, caller):
        client = RewardModelClient(caller, RewardModelConfig(path=str(path)))
        await caller.get("/health", EngineHealth, timeout_s=START_S)
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s or rounds < 2:
            start_s = time.perf_counter()
            scores = await asyncio.gather(*(client.score(prompt, t) for t in texts))
            spent_s["server"] += time.perf_counter() - start_s
            for name in ("plain", "sorted"):
                start_s = time.perf_counter()
                expected = plain.scores(texts, is_sorted=name == "sorted")
                spent_s[name] += time.perf_counter() - start_s
                torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
            rounds += 1
    num_tokens = client.gauges()["reward/tokens"]
    for name, taken_s in spent_s.items():
        print(f"{name:<8} {num_tokens / taken_s:8.0f} tokens/s in {rounds} rounds")
    return min(spent_s["plain"], spent_s["sorted"]) / spent_s["server"]


def main() -> None:
    given = options(__doc__, seconds=30.0).parse_args()
    torch.set_num_threads(1)
    with (
        reported("reward_model", is_kept=given.write),
        tempfile.TemporaryDirectory() as folder,
    ):
        print(f"ratio: {asyncio.run(measure(Path(folder), given.seconds)):.2f}")


if __name__ == "__main__":
    main()
