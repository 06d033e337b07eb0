"""The embedded engine's loop, in process: swaps, ends and crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_in_process import answered, drawn, make_qwen3, make_request, make_spec, running_engine, stage_file
from engine_replies import ask
from tiny_model import make_tiny_model

from asyncrl.messages.engine_api import CommitRequest
from asyncrl_servers.embedded.embedded_engine import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("loop") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("loop") / "other", seed=1, num_hidden_layers=2)


@pytest.mark.parametrize("interrupt", ["keep", "keep_kv"])
def test_kept_request_rereads_its_tokens_or_keeps_its_cache(
    folder: Path, other_folder: Path, tmp_path: Path, interrupt: str
) -> None:
    engine, at = build_engine(make_spec(folder)), 30
    staged = engine.weights.prepare(stage_file(other_folder, 1, tmp_path))
    (future,) = ask(engine, [make_request(max_tokens=200)])
    for _ in range(at):
        engine.turn()
    commit = {"version": 1, "digest": staged.digest, "interrupt": interrupt}
    swapped = engine.commit(CommitRequest.model_validate(commit))
    while not future.done():
        engine.turn()
    assert swapped.result(timeout=0).num_interrupted == 1
    answer = future.result(timeout=0)
    spans = [(span.start, span.end, span.version) for span in answer.version_spans]
    assert spans == [(0, at, 0), (at, 200, 1)]
    with running_engine(other_folder) as engine:
        resumed = (1, 2, 3, *answer.token_ids[:at])
        fresh = answered(engine, prompt_ids=resumed, max_tokens=200 - at, num_resumed=at)
    is_fresh = (answer.token_ids[at:], answer.logprobs[at:]) == drawn(fresh)
    assert is_fresh == (interrupt == "keep")


def test_end_token_ends_the_answer_and_belongs_to_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", initializer_range=0.02)
    with running_engine(folder, slots=8) as engine:
        eos_ids = engine.runner.loaded.eos_ids
        futures = ask(engine, [make_request(f"r{seed}", seed=seed, max_tokens=250) for seed in range(8)])
        answers = [future.result(timeout=60) for future in futures]
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped, "8 answers of 250 near-uniform draws from 50 tokens without the end token: odds 1e-17"
    for answer in stopped:
        assert answer.token_ids[-1] in eos_ids
        assert not eos_ids & set(answer.token_ids[:-1])


def test_stop_string_ends_a_resumed_answer_too(tiny_model_dir: Path) -> None:
    with running_engine(tiny_model_dir) as engine:
        tokenizer = engine.runner.loaded.tokenizer
        assert tokenizer is not None
        whole = answered(engine, max_tokens=60, seed=3)
        text = tokenizer.decode(whole.token_ids, skip_special_tokens=True)
        stop = ("not in there", text[10:14])
        stopped = answered(engine, max_tokens=60, seed=3, stop=stop)
        found = tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
        assert (found, stopped.finish_reason) == (text[: text.index(stop[1]) + 4], "stop")
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        cut = len(stopped.token_ids) - 2
        prompt = (1, 2, 3, *whole.token_ids[:cut])
        rest = answered(engine, prompt_ids=prompt, num_resumed=cut, max_tokens=60 - cut, seed=3, stop=stop)
    assert (rest.token_ids, rest.finish_reason) == (stopped.token_ids[cut:], "stop")


def test_nonfinite_weights_end_the_engine(folder: Path, tmp_path: Path) -> None:
    crashes: list[BaseException] = []
    engine = build_engine(make_spec(folder, slots=1), crashes.append)
    broken = {name: torch.full_like(one, torch.nan) for name, one in engine.weights._parameters.items()}
    staged = engine.weights.prepare(stage_file(broken, 1, tmp_path))
    (future,) = ask(engine, [make_request(max_tokens=200)])
    engine.commit(CommitRequest(version=1, digest=staged.digest, interrupt="keep"))
    engine.start()
    engine._thread.join()
    assert isinstance(crashes[0], FloatingPointError)
    assert "policy_version 1" in str(crashes[0])
    assert not future.done(), "the process ends with on_crash: nothing is answered from broken weights"
