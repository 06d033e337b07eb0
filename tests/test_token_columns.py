"""A new column reaches the loss: no part between the engine that makes it and its
reader knows it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngineServer, LetterEngine
from gateway_capture_cases import CharRenderer
from rollout_cases import virtual
from weight_cases import publish

from asyncrl.agents.endpoint.capture import Capture
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.journal.schema import (
    decode_partial,
    decode_trajectory,
    encode_partial,
    encode_trajectory,
)
from asyncrl.messages.records import (
    Batch,
    Completion,
    Group,
    GroupId,
    Outcome,
    Prompt,
    VersionSpan,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import (
    BEHAVIOUR,
    COLUMNS,
    EMPTY,
    ROUTING,
    SUPPORT,
    TOP_IDS,
    Column,
    Ragged,
    Tokens,
)
from asyncrl.messages.trainer_api import pack_batch, unpack_batch
from asyncrl.rollouts.rollout import make_trajectory
from asyncrl.trainer.loss.packing import Costs, PackRules, micro_batches
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.trainer.trainer_client import pack_groups

NEW = [
    Column("surprise", "<f4"),
    COLUMNS[SUPPORT],
    Column("readers", "<u2", shape="several", covers="all", fill=999),
]


def values_at(column: Column, token: int, position: int) -> Any:
    """The values that the engine makes for a token at its position in the text."""
    if column.shape == "one":
        return token + position / 1024
    if column.shape == "any":
        return [token + number for number in range(position % 4)]
    return [position, token]


def made(column: Column, ids: list[int], first: int) -> Any:
    values = [values_at(column, token, first + at) for at, token in enumerate(ids)]
    return (
        Ragged.of(values, column.dtype)
        if column.shape == "any"
        else np.array(values, column.dtype)
    )


def plain(values: Any) -> list[Any]:
    return values.lists() if isinstance(values, Ragged) else values.tolist()


class ColumnEngine(LetterEngine):
    """Reports the column with each row, and with the first one the prompt if the column
    covers it.
    """

    def __init__(self, server: FakeEngineServer, column: Column) -> None:
        super().__init__(server)
        self.column = column
        self.begun = set[int]()

    def report(self, run: Any, row: Any) -> None:
        tokens, prompt = row.tokens, run.request.prompt_ids
        first = len(prompt) + run.num_told - len(tokens)
        if self.column.covers == "all" and run.number not in self.begun and len(tokens):
            tokens = Tokens.join([Tokens(np.array(prompt, np.int32)), tokens])
            first = 0
        self.begun.add(run.number)
        columns = {self.column.name: made(self.column, tokens.ids.tolist(), first)}
        super().report(run, row._replace(tokens=tokens.with_columns(columns)))


def check(column: Column, tokens: Tokens) -> None:
    """The sampled tokens have their values; context too if the column covers it and an
    engine has read it.
    """
    found = plain(tokens.column(column.name))
    num_checked = 0
    for position, (token, value) in enumerate(
        zip(tokens.ids.tolist(), found, strict=True)
    ):
        if tokens.is_sampled[position] or column.covers == "all":
            assert value == values_at(column, token, position), position
            num_checked += 1
        else:
            assert value in (column.fill, [])
    assert num_checked > 3


@pytest.mark.parametrize("column", NEW, ids=lambda column: column.name)
@pytest.mark.parametrize("interrupt", ["abort", "keep"])
@virtual
async def test_new_column_reaches_the_packed_batch(
    column: Column, interrupt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COLUMNS, column.name, column)
    fake = FakeEngineServer()
    fake.engine = ColumnEngine(fake, column)
    pool = EnginePool([EngineServer(fake)], slots=4)

    async def sample(prompt_ids: Any, name: str, **options: Any) -> Completion:
        request = SamplingRequest(
            request_id=name, prompt_ids=prompt_ids, max_tokens=12, seed=len(name)
        )
        return await pool.generate(request, **options)

    # One turn, with new weights in its middle; streamed chunks, or one answer a
    # segment.
    segments = list[Completion]()
    sampling = asyncio.create_task(
        sample((5, 6, 7), "single", on_segment=segments.append)
    )
    await asyncio.sleep(0.055)
    await publish(pool.servers[0], 1, interrupt=interrupt)
    whole = await sampling
    assert whole.num_interruptions == len(segments)
    check(column, whole.tokens)

    # The same turn in a run that was killed after its first segment.
    if segments:
        partial = decode_partial(encode_partial(0, 0, segments[0]), 0, 0)
        check(column, (await sample((5, 6, 7), "single", partial=partial)).tokens)

    # An agent of two turns, and a fork of the second one.
    capture = Capture(CharRenderer())
    for number, ids in enumerate(([1, 2, 3], [], [])):
        before = capture._nodes["turn-0"].all_ids().tolist() if number else []
        planned = capture.plan([*before, *ids, 40 + number])
        answer = await sample(
            planned.prompt_ids, f"turn-{number}", on_tokens=lambda ids: None
        )
        capture.record(
            planned, answer, {"role": "assistant", "content": ""}, f"turn-{number}"
        )
    rollout = capture.rollout(1, Outcome(reward=1.0), 1.0)
    assert len(rollout) == 2

    # Journal, batch and micro-batch.
    single = decode_trajectory(
        encode_trajectory(0, make_trajectory(0, whole, 0.5)), 0, 0, 0
    )
    branches = [
        decode_trajectory(encode_trajectory(0, one), 0, 1, one.branch)
        for one in rollout
    ]
    for trajectory in (single, *branches):
        check(column, trajectory.tokens)
    group = Group(GroupId(0), Prompt("0/0", ()), (single, *branches))
    header, tokens = unpack_batch(pack_batch(*pack_groups(Batch(2, (group,), 0))))
    micros = micro_batches(
        header,
        tokens,
        tokens.is_sampled.copy(),
        PackRules(64),
        torch.device("cpu"),
        Ranks(0, 1),
        Costs(0.1, 0.1),
    )
    read = plain(tokens.column(column.name))
    starts = np.array([entry.start for entry in header.trajectories])
    num_loss = 0
    for micro, _ in micros:
        targets = micro.target_U[micro.pair_M].tolist()
        for source, target in zip(micro.source_M.tolist(), targets, strict=True):
            position = source - int(starts[starts <= source].max())
            assert read[source] == values_at(column, target, position)
            num_loss += 1
    assert num_loss == sum(trajectory.num_sampled for trajectory in (single, *branches))


def test_parts_without_tokens_change_no_join_even_after_a_frame() -> None:
    experts = np.arange(12, dtype=np.uint16).reshape(3, 4)
    tokens = Tokens(
        np.arange(3, dtype=np.int32), (VersionSpan(0, 3, 1),), {ROUTING: experts}
    )
    # A frame is flat, so of no tokens it cannot tell that each has four experts.
    empty = Tokens.from_arrays(tokens.slice(3).arrays())
    for parts in ([tokens, empty], [empty, tokens], [empty, tokens, empty]):
        joined = Tokens.join(parts)
        assert joined.columns[ROUTING].tolist() == experts.tolist()
        assert joined.spans == tokens.spans
    assert len(Tokens.join([empty, EMPTY])) == len(Tokens.join([])) == 0


def test_a_copy_holds_no_other_arrays() -> None:
    whole = Tokens(
        np.arange(5, dtype=np.int32),
        (VersionSpan(0, 5, 1),),
        {
            BEHAVIOUR: np.zeros(5, np.float32),
            TOP_IDS: Ragged.of([[1], [], [2, 3], [], []], "<i4"),
        },
    )
    part = whole.slice(1, 4).copy()
    assert part.ids.tolist() == [1, 2, 3]
    chosen = part.columns[TOP_IDS]
    assert isinstance(chosen, Ragged)
    assert chosen.lists() == [[], [2, 3], []]
    held = [part.ids, part.columns[BEHAVIOUR], *chosen]
    assert all(array.base is None for array in held)


def test_columns_of_a_client_end_with_its_answer() -> None:
    """Neither the journal nor a batch has them."""
    capture = Capture(CharRenderer())
    columns = {TOP_IDS: Ragged.of([[], [], [7]], "<i4")}
    spans = (VersionSpan(2, 3, 0),)
    answer = Completion(
        Tokens(np.array([1, 2, 7], np.int32), spans, columns), 2, "stop"
    )
    message = {"role": "assistant", "content": ""}
    capture.record(capture.plan([1, 2]), answer, message, "turn-0")
    (branch,) = capture.rollout(0, Outcome(reward=1.0), 1.0)
    assert TOP_IDS not in branch.tokens.columns
