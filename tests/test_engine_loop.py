"""The embedded engine's loop, in process: slots, shared prompts, swaps, and what happens when something
breaks.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from engine_in_process import make_qwen3, make_request, make_spec, running_engine, staging_request, weights_of
from tiny_model import make_tiny_model

from asyncrl.http import Refused
from asyncrl.messages.engine_calls import CommitRequest, GenerateResponse
from asyncrl_servers.embedded.build_engine import build_engine
from asyncrl_servers.embedded.decode_loop import Engine
from asyncrl_servers.embedded.loaded_weights import StagedWeights, digest_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("loop") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("loop") / "other", seed=1, num_hidden_layers=2)


def commit_weights(
    engine: Engine, folder: Path, version: int, scratch: Path, interrupt: str = "abort"
) -> None:
    staged = engine.prepare(staging_request(weights_of(folder), version, scratch))
    commit = CommitRequest.model_validate(
        {"version": version, "digest": staged.digest, "interrupt": interrupt}
    )
    assert engine.commit(commit).result(timeout=60).digest == staged.digest


def answer_across_a_swap(
    folder: Path, other: Path, scratch: Path, interrupt: str, at: int
) -> GenerateResponse:
    """The answer to a request whose weights are swapped after `at` tokens, by turning the loop by hand."""
    engine = build_engine(make_spec(folder))
    staged = engine.prepare(staging_request(weights_of(other), 1, scratch))
    future = engine.submit(make_request(max_tokens=200))
    for _ in range(at - 1):  # the first turn gives two tokens: prefill, and a step
        engine.turn()
    swapped = engine.commit(
        CommitRequest.model_validate({"version": 1, "digest": staged.digest, "interrupt": interrupt})
    )
    while not future.done():
        engine.turn()
    assert swapped.result(timeout=0).num_interrupted == 1
    return future.result(timeout=0)


def test_a_prompt_that_a_group_shares_is_prefilled_once(folder: Path) -> None:
    with running_engine(folder, slots=3) as engine:
        futures = [
            engine.submit(make_request(f"r{seed}", prompt_ids=(4, 5, 6), seed=seed)) for seed in range(8)
        ]
        answers = [tuple(future.result(timeout=60).token_ids) for future in futures]
        assert engine.runner.num_prefilled == 1
        engine.submit(make_request("other prompt", prompt_ids=(4, 5))).result(timeout=60)
        assert engine.runner.num_prefilled == 2
    assert len(set(answers)) == 8, (
        "8 seeds draw 20 tokens each from 50: equal ones mean that the seed is not used"
    )


def test_the_prompt_cache_stays_within_its_bytes_and_keeps_what_was_used_last(folder: Path) -> None:
    engine = build_engine(make_spec(folder, slots=1, max_length=64))
    engine.runner.prompts.max_bytes = 3 * (engine.runner.loaded.shape.bytes_per_token(4) * 10 + 50 * 4)
    engine.start()
    try:
        for index, first in enumerate((1, 2, 3, 1, 4, 1, 2)):
            prompt = (first, *range(9))
            engine.submit(make_request(f"r{index}", prompt_ids=prompt, max_tokens=1)).result(timeout=60)
            assert engine.runner.prompts.num_bytes <= engine.runner.prompts.max_bytes
        assert engine.runner.num_prefilled == 5, "1, 2, 3, 4 once each, and 2 again, which 4 pushed out"
    finally:
        engine.stop()


def test_a_remembered_prompt_does_not_outlive_the_weights_that_filled_it(
    folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    with running_engine(other_folder) as engine:
        expected = engine.submit(make_request()).result(timeout=60)
    with running_engine(folder) as engine:
        before = engine.submit(make_request()).result(timeout=60)
        commit_weights(engine, other_folder, 1, tmp_path)
        after = engine.submit(make_request()).result(timeout=60)
    assert (after.token_ids, after.logprobs) == (expected.token_ids, expected.logprobs)
    assert before.logprobs != after.logprobs


def test_a_kept_request_goes_on_as_if_the_new_weights_had_read_its_tokens(
    folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    answer = answer_across_a_swap(folder, other_folder, tmp_path, "keep", at=30)
    assert [(span.start, span.end, span.version) for span in answer.version_spans] == [
        (0, 30, 0),
        (30, 200, 1),
    ]
    at = 30
    with running_engine(other_folder) as engine:
        resumed = make_request(
            prompt_ids=(1, 2, 3, *answer.token_ids[:at]), max_tokens=200 - at, num_resumed=at
        )
        fresh = engine.submit(resumed).result(timeout=60)
    assert (answer.token_ids[at:], answer.logprobs[at:]) == (fresh.token_ids, fresh.logprobs)


def test_keep_kv_goes_on_over_the_old_cache_with_other_logprobs_than_a_fresh_server(
    folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    answer = answer_across_a_swap(folder, other_folder, tmp_path, "keep_kv", at=30)
    assert [(span.start, span.end, span.version) for span in answer.version_spans] == [
        (0, 30, 0),
        (30, 200, 1),
    ]
    at = 30
    with running_engine(other_folder) as engine:
        resumed = make_request(
            prompt_ids=(1, 2, 3, *answer.token_ids[:at]), max_tokens=200 - at, num_resumed=at
        )
        fresh = engine.submit(resumed).result(timeout=60)
    assert answer.logprobs[at : at + 3] != fresh.logprobs[:3]


def test_the_engine_says_what_the_models_own_forward_says(folder: Path) -> None:
    from transformers import Qwen3ForCausalLM

    with running_engine(folder) as engine:
        answer = engine.submit(make_request(max_tokens=100)).result(timeout=60)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *answer.token_ids]])).logits[0, 2:-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_a_model_run_through_its_own_forward_gives_what_the_short_way_gives(folder: Path) -> None:
    prompts = [(1, 2, 3), (4,), tuple(range(40))]
    answers: list[list[GenerateResponse]] = []
    for is_short in (True, False):
        engine = build_engine(make_spec(folder))
        assert engine.runner._plain is not None
        if not is_short:
            engine.runner._plain = None
        engine.start()
        futures = [
            engine.submit(make_request(f"r{index}", prompt_ids=prompt))
            for index, prompt in enumerate(prompts)
        ]
        answers.append([future.result(timeout=60) for future in futures])
        engine.stop()
    for short, own in zip(*answers, strict=True):
        assert short.token_ids == own.token_ids
        assert torch.allclose(torch.tensor(short.logprobs), torch.tensor(own.logprobs), atol=1e-4)


def test_an_end_of_sequence_token_ends_the_answer_and_belongs_to_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", initializer_range=0.02)
    with running_engine(folder, slots=8) as engine:
        eos_ids = engine.runner.loaded.eos_ids
        answers = [engine.submit(make_request(f"r{seed}", seed=seed, max_tokens=250)) for seed in range(8)]
        stopped = [
            answer.result(timeout=60)
            for answer in answers
            if answer.result(timeout=60).finish_reason == "stop"
        ]
    assert stopped, (
        "8 answers of 250 near-uniform draws from about 50 tokens without the end token: odds 1e-17"
    )
    for answer in stopped:
        assert answer.token_ids[-1] in eos_ids
        assert not eos_ids & set(answer.token_ids[:-1])
        assert len(answer.logprobs) == len(answer.token_ids)


def test_a_stop_string_ends_the_answer_also_when_it_lies_over_the_joint_of_a_resumed_request(
    tiny_model_dir: Path,
) -> None:
    with running_engine(tiny_model_dir) as engine:
        tokenizer = engine.runner.loaded.tokenizer
        assert tokenizer is not None
        whole = engine.submit(make_request(max_tokens=60, seed=3)).result(timeout=60)
        text = tokenizer.decode(whole.token_ids, skip_special_tokens=True)
        stop = text[10:14]
        stopped = engine.submit(make_request(max_tokens=60, seed=3, stop=["not in there", stop])).result(
            timeout=60
        )
        assert stopped.finish_reason == "stop"
        found = tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
        assert found == text[: text.index(stop) + 4]
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        cut = len(stopped.token_ids) - 2
        resumed = make_request(
            prompt_ids=(1, 2, 3, *whole.token_ids[:cut]),
            num_resumed=cut,
            max_tokens=60 - cut,
            seed=3,
            stop=["not in there", stop],
        )
        rest = engine.submit(resumed).result(timeout=60)
    assert (rest.token_ids, rest.finish_reason) == (stopped.token_ids[cut:], "stop")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_weights_that_are_not_finite_end_the_engine_and_every_request_is_answered(
    folder: Path, tmp_path: Path
) -> None:
    crashes: list[BaseException | None] = []
    engine = build_engine(make_spec(folder, slots=1), crashes.append)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights_of(folder).items()}
    staged = engine.prepare(staging_request(broken, 1, tmp_path))
    futures: list[Future[GenerateResponse]] = [
        engine.submit(make_request(f"r{index}", max_tokens=200)) for index in range(3)
    ]
    engine.commit(CommitRequest(version=1, digest=staged.digest, interrupt="keep"))
    engine.start()
    for future in futures:
        with pytest.raises(RuntimeError, match="engine loop died"):
            future.result(timeout=60)
    engine._thread.join()
    with pytest.raises(RuntimeError, match="engine loop died"):
        engine.submit(make_request("too late")).result(timeout=60)
    assert isinstance(crashes[0], FloatingPointError)
    assert "policy_version 1" in str(crashes[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_is_told_before_any_answer_so_that_the_process_is_gone_before_it_can_refuse_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    engine = build_engine(make_spec(folder), lambda _: order.append("crash"))

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(engine.runner, "decode", out_of_memory)
    future = engine.submit(make_request())
    future.add_done_callback(lambda _: order.append("answer"))
    engine.start()
    with pytest.raises(RuntimeError, match="engine loop died"):
        future.result(timeout=60)
    engine._thread.join()
    assert order == ["crash", "answer"]


def test_no_commit_hashes_weights_not_even_the_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(make_spec(folder))
    staged = engine.prepare(staging_request(weights_of(folder), 1, tmp_path))

    def hash_them(_: object) -> str:
        raise AssertionError("decoding stands still while weights are hashed")

    monkeypatch.setattr("asyncrl_servers.embedded.loaded_weights.digest_tensors", hash_them)
    committed = engine.commit(CommitRequest(version=1, digest=staged.digest))
    engine.turn()
    assert committed.result(timeout=0).version == 1


def test_a_swap_that_fails_leaves_the_old_weights_serving(folder: Path, other_folder: Path) -> None:
    half = dict(list(weights_of(other_folder).items())[:-1])
    with running_engine(folder) as engine:
        before = engine.submit(make_request("before")).result(timeout=60)
        digest = engine.weights.digest
        engine.weights._staged = StagedWeights(1, "half", half)
        with pytest.raises(RuntimeError, match="policy_version 1"):
            engine.commit(CommitRequest(version=1, digest="half")).result(timeout=60)
        after = engine.submit(make_request("after")).result(timeout=60)
        assert digest_tensors(dict(engine.runner.loaded.model.named_parameters())) == digest
    assert (after.token_ids, after.logprobs, after.version_spans) == (
        before.token_ids,
        before.logprobs,
        before.version_spans,
    )


def test_requests_beyond_the_queues_bound_are_refused(folder: Path) -> None:
    engine = build_engine(make_spec(folder, slots=1, max_queued=2))
    futures = [engine.submit(make_request(f"r{index}", max_tokens=5)) for index in range(4)]
    engine.start()
    try:
        with pytest.raises(Refused, match="2 requests are queued") as refusal:
            futures[3].result(timeout=60)
        assert refusal.value.status == 503
        assert [len(future.result(timeout=60).token_ids) for future in futures[:2]] == [5, 5]
    finally:
        engine.stop()
