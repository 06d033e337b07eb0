"""Sampled tokens as text again, one piece for each version. Knows a run's tokenizer where it lies; imports no torch for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.observe.run_files import RunFiles
from asyncrl.producers.tokenizer import HFChatTokenizer
from asyncrl.types import VersionSpan


class Decoder:
    """Text of token ids, if the run's tokenizer can be found. `source` is its folder, or why there is none."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, source: str) -> None:
        self.decode, self.source = decode, source

    @classmethod
    def of_run(cls, files: RunFiles) -> Decoder:
        """From the model folder of the run, else the one that it was given. Only tokenizer.json: other formats would import torch."""
        model = files.config.model
        folders = [files.run_dir / "model", files.run_dir / "final", *([Path(model.path).expanduser()] if model.path else [])]
        folder = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
        if folder is None:
            return cls(None, f"no tokenizer.json in {', '.join(map(str, folders))}")
        try:
            return cls(HFChatTokenizer(folder, chat_template=model.chat_template).decode, str(folder))
        except ConfigError as error:
            return cls(None, str(error))


def pieces(token_ids: Sequence[int], spans: Sequence[VersionSpan], decoder: Decoder) -> list[dict[str, Any]]:
    """[start, end), version, engine (where known) and text of each span, or its token ids where there is no tokenizer.

    A character may need the tokens of two spans that follow each other: it is shown with the later one.
    """
    found = []
    first, shown = 0, ""
    for number, span in enumerate(spans):
        if number == 0 or span.start != spans[number - 1].end:  # a turn begins: what stands before it was not sampled
            first, shown = span.start, ""
        plain: dict[str, Any] = {"start": span.start, "end": span.end, "version": span.version}
        if span.engine >= 0:
            plain["engine"] = span.engine
        if decoder.decode is None:
            found.append(plain | {"token_ids": list(token_ids[span.start : span.end])})
            continue
        whole = decoder.decode(token_ids[first : span.end])
        if number + 1 < len(spans) and spans[number + 1].start == span.end:
            whole = whole.rstrip("�")
        text = whole[len(shown) :] if whole.startswith(shown) else decoder.decode(token_ids[span.start : span.end])
        found.append(plain | {"text": text})
        shown = whole
    return found
