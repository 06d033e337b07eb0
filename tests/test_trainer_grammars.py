"""Training on answers of a grammar: engine and trainer agree on the logprobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_in_process import make_qwen3, make_spec
from test_engine_grammars import PERSON, VOCAB, answers, asking
from test_engine_resumed import SMALL
from text_tokenizers import byte_level, save
from trainer_cases import make_spec as make_trainer_spec

from asyncrl.messages.records import Batch, GrammarSpan, Group, GroupId, Prompt, Trajectory, VersionSpan
from asyncrl.trainer.step import TrainStep
from asyncrl.trainer.trainer_client import pack_groups
from asyncrl_servers.embedded.embedded_engine import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, eos_token_id=1, **SMALL)
    save(byte_level(), folder)
    return folder


@pytest.fixture(scope="module")
def batch(folder: Path) -> Batch:
    """Two groups, each of two answers of a grammar and a free one, as an engine samples them."""
    engine, groups = build_engine(make_spec(folder, slots=4, max_length=300)), []
    for number in range(2):
        asked = [asking(PERSON, 10 * number + seed) for seed in range(2)]
        asked.append(replace(asked[0], grammar=None, max_tokens=30, seed=99))
        trajectories = []
        for sample, (request, answer) in enumerate(zip(asked, answers(engine, *asked), strict=True)):
            start, end = len(request.prompt_ids), len(request.prompt_ids) + len(answer.token_ids)
            span = () if request.grammar is None else (GrammarSpan(start, end, request.grammar),)
            trajectories.append(
                Trajectory(
                    sample_index=sample,
                    token_ids=np.array([*request.prompt_ids, *answer.token_ids], np.int32),
                    loss_mask=np.arange(end) >= start,
                    behaviour_logprobs=np.array([0.0] * start + answer.logprobs, np.float32),
                    version_spans=(VersionSpan(start, end, 0, 0),),
                    reward=float(sample),
                    grammars=span,
                )
            )
        groups.append(Group(GroupId(number), Prompt(f"p{number}", ()), tuple(trajectories)))
    return Batch(version=0, groups=tuple(groups), min_version=0)


def test_token_that_its_grammar_forbids_is_not_trained(
    folder: Path, batch: Batch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine with another llguidance may have sampled the token."""
    header, arrays = pack_groups(batch)
    spec = make_trainer_spec(folder, tmp_path)
    entry = header.trajectories[0]
    ids = arrays.token_ids.copy()
    wrong = entry.start + entry.grammars[0][0] + 4
    ids[wrong] = 1  # the end, in the middle
    told = TrainStep(spec).train(header, arrays.model_copy(update={"token_ids": ids}))
    assert told["tokens/trained"] == arrays.loss_mask.sum() - (entry.end - wrong)
    assert "tokens are not trained: their grammar does not allow them" in caplog.text
