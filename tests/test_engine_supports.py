"""Supports of an embedded server, over HTTP: cuts that keep a part of the vocabulary, or
all of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_processes import SECRET, engine_process

from asyncrl.base.http import Caller
from asyncrl.engines.engine import EngineServer
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SUPPORT, Ragged

CUTS = {
    "a part": {"top_k": 3},
    "more than the vocabulary": {"top_k": 10**6},
    "nearly all": {"top_p": 0.9999999},
    "all by min_p": {"min_p": 1e-9},
    "none": {},
}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_cut_that_keeps_the_whole_vocabulary_is_an_answer(
    tiny_model_dir: Path, tmp_path: Path, is_streamed: bool
) -> None:
    """All at once, so that rows of one frame differ."""

    async def story(url: str) -> dict[str, list[int] | None]:
        caller = Caller("engine-0", url, SECRET)
        server = EngineServer(caller)

        async def ask(name: str) -> list[int] | None:
            request = SamplingRequest(
                name,
                [7, 8, 9],
                6,
                seed=3,
                **CUTS[name],  # type: ignore[arg-type]
            )
            chunks = []
            part = await server.generate_segment(
                request, on_chunk=chunks.append if is_streamed else None
            )
            sizes = list[int]()
            for each in [*chunks, part]:
                support = each.sampled.columns.get(SUPPORT)
                if isinstance(support, Ragged):
                    sizes += support.sizes.tolist()
            return sizes

        found = await asyncio.gather(*map(ask, CUTS))
        server.disconnect_nowait()
        await caller.aclose()
        return dict(zip(CUTS, found, strict=True))

    spec = {"name": "engine-0", "slots": 8, "max_length": 64, "device": "cpu"}
    with engine_process(
        "embedded", spec | {"model_path": str(tiny_model_dir)}, tmp_path
    ) as server:
        sizes = asyncio.run(story(server.url))
    assert sizes["a part"] == [3] * 6
    for name in ("more than the vocabulary", "nearly all", "all by min_p"):
        assert sizes[name] == [0] * 6, "empty: the whole vocabulary"
