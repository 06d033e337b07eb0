"""Adapters in the embedded engine compute like peft's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import OF_PEFT, assert_of_peft, spec, tensors_of
from engine_in_process import (
    answered,
    drawn,
    make_qwen3,
    make_request,
    publish,
    running_engine,
    stage_file,
)
from engine_replies import ask
from model_zoo import make_config
from safetensors.torch import load_file
from trainer_cases import make_batch
from trainer_cases import make_spec as trainer_spec
from transformers import AutoModelForImageTextToText

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import (
    CommitRequest,
    LoadChunkRequest,
    PrepareRequest,
    WakeRequest,
)
from asyncrl.messages.tokens import SegmentPart
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl_servers.embedded.embedded_engine import Engine

pytestmark = OF_PEFT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("model") / "qwen3")


def sampled(engine: Engine) -> SegmentPart:
    return answered(engine, max_tokens=40)


def test_pushed_adapters_compute_like_peft(folder: Path, tmp_path: Path) -> None:
    with running_engine(folder) as plain:
        base = sampled(plain)
    with running_engine(folder, adapters=spec()) as engine:
        assert drawn(sampled(engine)) == drawn(base), "adapters begin as zeros"
        tokens = {tuple(base.token_ids)}
        for version in (1, 2):
            tensors = tensors_of(folder, version)
            publish(engine, stage_file(tensors, version, tmp_path))
            answer = sampled(engine)
            assert_of_peft(answer, folder, tensors, tmp_path / f"peft-{version}")
            tokens.add(tuple(answer.token_ids))
        assert len(tokens) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [1, 4, 8, 16, 32])
def test_bits_with_adapters_do_not_depend_on_the_batch(
    folder: Path, tmp_path: Path, rank: int, dtype: str
) -> None:
    tensors = tensors_of(folder, 1, rank)
    with running_engine(
        folder, adapters=spec(rank), dtype=dtype, slots=9, deterministic=True
    ) as engine:
        dtyped = {
            name: one.to(engine.runner.loaded.dtype) for name, one in tensors.items()
        }
        publish(engine, stage_file(dtyped, 1, tmp_path))
        alone = drawn(sampled(engine))
        others = [
            make_request(f"other {n}", (5, 6 + n) * (n + 1), seed=n, max_tokens=30 + n)
            for n in range(8)
        ]
        answers = ask(engine, [*others, make_request(max_tokens=40)])
        assert drawn(answers[-1].result(timeout=60)) == alone


def test_a_sleep_keeps_the_initial_weights_and_chunks_bring_adapters(
    folder: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(folder, 1)
    staged = stage_file(tensors, 1, tmp_path)
    with running_engine(folder, adapters=spec(), aside_dir=tmp_path) as engine:
        first = drawn(sampled(engine))
        assert engine.sleep().result(timeout=60).num_bytes > 1_000_000
        engine.wake(WakeRequest(parts=["weights", "kv"])).result(timeout=60)
        chunk = staged.model_dump() | {"index": 0, "is_last": True}
        del chunk["member"]
        engine.weights.load_chunk(LoadChunkRequest.model_validate(chunk))
        publish_loaded(engine, staged.digest)
        answer = sampled(engine)
        assert drawn(answer) != first
        assert_of_peft(answer, folder, tensors, tmp_path / "peft")


def publish_loaded(engine: Engine, digest: str) -> None:
    commit = CommitRequest(version=1, digest=digest)
    assert engine.commit(commit).result(timeout=60).version == 1


def test_pushes_of_other_tensors_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = tensors_of(folder, 1)
    whole = load_file(folder / "model.safetensors")
    one_less = {name: tensors[name] for name in [*tensors][1:]}
    with running_engine(folder, adapters=spec()) as engine:
        for number, pushed in enumerate((whole, one_less, tensors_of(folder, 1, 8))):
            with pytest.raises(Refused, match="does not fit the model in"):
                engine.weights.prepare(stage_file(pushed, number + 1, tmp_path))
    with (
        running_engine(folder) as engine,
        pytest.raises(Refused, match="does not fit the model in"),
    ):
        engine.weights.prepare(stage_file(tensors, 9, tmp_path))


def test_unknown_targets_end_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(SystemExit),
        running_engine(folder, adapters=spec(4, "nonesuch")),
    ):
        pass
    assert "has no layer nonesuch" in capsys.readouterr().err


def test_adapter_of_a_composites_tied_head_is_pushed_by_its_name(
    tmp_path: Path,
) -> None:
    """The checkpoint of Gemma 3 with images names the text part's weights differently."""
    folder = tmp_path / "model"
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(make_config("gemma3"))
    whole.save_pretrained(folder)
    targets = ["q_proj", "lm_head"]
    trainer = {"lora": {"rank": 2, "alpha": 4.0, "targets": targets}}
    spec = trainer_spec(folder, tmp_path, trainer=trainer, dtype="float32")
    rank = TrainerRank(spec)
    (tmp_path / "staging").mkdir(exist_ok=True)
    rank.train(*make_batch())
    sent = rank.begin_export(tmp_path / "staging/v1.safetensors")()
    fields = sent.model_dump(include={*PrepareRequest.model_fields})
    adapters = {"rank": 2, "scale": 2.0, "targets": targets}
    with running_engine(folder, adapters=adapters) as engine:
        loaded = engine.weights.prepare(PrepareRequest(**fields))
    assert loaded.digest == sent.digest
