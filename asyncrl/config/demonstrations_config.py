"""Section `demonstrations`, and the keys that it shares with `data` of supervised
fine-tuning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from asyncrl.config.fields import FrozenConfig


class RowsConfig(FrozenConfig):
    """Chats whose assistant messages are learned."""

    section: ClassVar[str] = "demonstrations"
    # Their tokens are pinned by a digest, so a moved file is still the same data.
    free_keys: ClassVar[Collection[str]] = ("files", "dataset", "split", "args")

    files: list[str] | None = None
    """JSONL or parquet files. A row has `messages`, or `prompt` and `completion`."""
    dataset: str | None = None
    """Hugging Face dataset, instead of `files`: hub id or folder."""
    split: str = "train"
    """Split of `dataset`."""
    args: dict[str, object] = {}
    """Settings of `datasets.load_dataset`."""
    shuffle: bool = True
    """Shuffle by seed, differently each epoch (false = file order)."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Maximum tokens of a row (none = the model's max_position_embeddings)."""
    overlong: Literal["refuse", "skip"] = "refuse"
    """Longer rows: refuse the data, or train without them. Rows are never cut."""

    def conflicts(self) -> Iterator[str]:
        if (self.files is None) == (self.dataset is None):
            yield f"give either {self.section}.files or {self.section}.dataset"


class DemonstrationsConfig(RowsConfig):
    """Demonstrations that each batch is mixed with, by algorithm.sft_weight
    (docs/sft.md).
    """

    max_tokens: int | None = Field(default=None, ge=2)
    """Maximum tokens of a row (none = rollout.max_prompt_tokens + rollout.max_tokens)."""
    num_rows: PositiveInt = 8
    """Rows of a batch. The last batch of an epoch may have fewer."""
