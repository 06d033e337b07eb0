"""`asyncrl export` writes the trained weights, pushes them to the hub, and does not
change the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from fake_hub import TOKEN, FakeHub
from huggingface_hub import constants
from job_runs import run, write_config
from made_runs import MadeRun, contents
from safetensors.torch import load_file
from tiny_model import STACKED, make_tiny_moe
from trainer_cases import MakeStep, make_spec, train_versions
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from asyncrl.base.errors import (
    AsyncrlError,
    CheckpointDamaged,
    ConfigError,
    find_fatal,
)
from asyncrl.job import checkpoint_callback
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.reporter import Reporter
from asyncrl.job.run_export import find_weights
from asyncrl.job.training_job import save_final
from asyncrl.launch.processes import Launcher
from asyncrl.observe.console import RunLog
from asyncrl.trainer.model.build_model import use_deterministic
from asyncrl.trainer.model.model_folder import GENERATION, TOKENIZER, ModelPin
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.state import copy_files
from asyncrl.weights.tensor_files import float32_names

LORA = {"rank": 4, "alpha": 8.0}
HEAD = {**LORA, "targets": ["q_proj", "lm_head"]}
"""The head of the tiny model is tied."""
SECRET = "/home/somebody/s3cret"


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(6, 20)[None]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(ids).logits
    return found


def loaded(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **more)


@pytest.mark.parametrize(
    ("lora", "experts"), [(None, ""), (LORA, ""), (HEAD, ""), (None, "deepseek_v3")]
)
def test_exported_checkpoint_equals_the_trainers_save(
    make_step: MakeStep, tiny_model_dir: Path, tmp_path: Path, lora: Any, experts: str
) -> None:
    dtype = "bfloat16"
    model = (
        make_tiny_moe(tmp_path / "moe", experts, **STACKED[experts])
        if experts
        else tiny_model_dir
    )
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    step = make_step(
        model, dtype=dtype, trainer={"lora": lora}, chat_template=str(template)
    )
    made = MadeRun(
        tmp_path,
        model,
        model={"dtype": dtype, "chat_template": str(template)},
        trainer={"lora": lora},
    )
    train_versions(step, 0, 2)
    made.checkpoint(step)
    out = made.export(tmp_path / "out")
    made.end(step)
    final = made.path / "final"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, final))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    in_float32 = {
        name for name in ours if name.endswith(".e_score_correction_bias")
    }  # of a router: no parameter
    in_float32 |= float32_names(loaded(final))
    kept = {
        name: getattr(torch, "float32" if name in in_float32 else dtype)
        for name in ours
    }
    assert {name: one.dtype for name, one in ours.items()} == kept
    assert {name: one.dtype for name, one in theirs.items()} == kept
    assert torch.equal(logits(loaded(out)), logits(loaded(final)))
    for name in (
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.json",
    ):
        assert (out / name).read_text() == (final / name).read_text(), name
    assert AutoTokenizer.from_pretrained(out).chat_template == template.read_text()
    again = made.export(tmp_path / "copied")  # the run is done: export copies final/
    assert (again / "model.safetensors").read_bytes() == (
        final / "model.safetensors"
    ).read_bytes()


# peft 0.21 asks transformers 5.23 by an old name
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("lora", [LORA, HEAD], ids=["layers", "tied head"])
def test_exported_adapters_compute_like_the_merged_model(
    make_step: MakeStep, tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    step, made = (
        make_step(trainer={"lora": lora}),
        MadeRun(tmp_path, tiny_model_dir, trainer={"lora": lora}),
    )
    train_versions(step, 0, 3)
    made.checkpoint(step)
    merged = logits(loaded(made.export(tmp_path / "merged")).double())
    adapter = made.export(tmp_path / "adapter", adapter=True)
    with_peft = peft.PeftModel.from_pretrained(loaded(tiny_model_dir), str(adapter))
    # In float64, so that only the rounding of the merged weights is left.
    distance = (logits(with_peft.double()) - merged).abs().max()
    assert distance <= 1e-6 * merged.abs().max(), distance
    assert (merged - logits(loaded(tiny_model_dir))).abs().max() > 1e-3
    made.end(step)  # final/ has no adapters
    again = made.export(tmp_path / "again", adapter=True)
    config = json.loads((again / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    assert AutoTokenizer.from_pretrained(again).chat_template
    with pytest.raises(ConfigError, match=r"trainer\.lora=none"):
        MadeRun(tmp_path / "copied", tiny_model_dir).export(
            tmp_path / "none", adapter=True
        )


@pytest.fixture(scope="module")
def evaluated(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> MadeRun:
    """Checkpoints of steps 1 to 3, evaluated; step 2 is the best."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "staging").mkdir()
    step = TrainerRank(make_spec(tiny_model_dir, folder))
    made = MadeRun(folder, tiny_model_dir, checkpoint={"every": 1})
    for version in range(3):
        train_versions(step, version, version + 1)
        made.checkpoint(step)
    rewards = {0: 0.9, 1: 0.2, 2: 0.5, 3: 0.3}
    lines = [
        {
            "policy_version": one,
            "eval/version": one,
            "eval/reward_mean": reward,
            "eval/seconds": 1.0,
        }
        for one, reward in rewards.items()
    ]
    (made.path / "eval.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    steps = [
        {
            "step": one,
            "time_s": float(one),
            "reward/mean": 0.1 * (one - 1),
            "sample/staleness_mean": 0.5,
        }
        | {"sample/staleness_max": one - 1, "tokens/trained": 100}
        for one in range(1, 5)
    ]
    (made.path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in steps)
    )
    use_deterministic(is_on=False)
    return made


@pytest.fixture
def made(evaluated: MadeRun, tmp_path: Path) -> MadeRun:
    """A copy of that run, of this test alone."""
    made = copy.copy(evaluated)
    made.path = shutil.copytree(evaluated.path, tmp_path / "run")
    return made


def damage(folder: Path) -> None:
    path = folder / "trainer" / "__0_0.distcp"
    path.write_bytes(b"x" + path.read_bytes()[1:])


def test_export_takes_the_asked_step_and_no_damaged_checkpoint(made: MadeRun) -> None:
    def found(step: str) -> int:
        return find_weights(made.path, made.config, step)[0]

    assert [found(step) for step in ("last", "best", "1")] == [3, 2, 1]
    for step in ("4", "-1", "newest"):
        with pytest.raises(
            ConfigError, match=f"--step {step}; available: steps 1, 2, 3"
        ):
            found(step)
    shutil.rmtree(made.path / "checkpoints" / "step_2")
    assert found("best") == 3
    damage(made.path / "checkpoints" / "step_3")
    with pytest.raises(
        CheckpointDamaged, match=r"step_3 is damaged: trainer/__0_0.distcp"
    ):
        found("last")
    (made.path / "eval.jsonl").unlink()
    with pytest.raises(ConfigError, match="no weights for --step best"):
        found("best")
    with pytest.raises(ConfigError, match="available: none"):
        find_weights(made.path.parent, made.config, "last")


@pytest.mark.parametrize("ends", [True, False])
def test_final_has_the_version_of_its_own_run(made: MadeRun, ends: bool) -> None:
    """The run was done at version 2, and extended to 3. Its metrics are lost."""
    (made.path / "metrics.jsonl").unlink()
    config = made.config.model_copy(
        update={"trainer": made.config.trainer.model_copy(update={"num_steps": 3})}
    )
    (made.path / "summary.json").write_text('{"state": "done", "policy_version": 2}')

    class Trainer:
        async def save(self, path: Path) -> None:
            await asyncio.to_thread(path.mkdir)

    trainer: Any = Trainer()
    lifecycle = Lifecycle(config, made.path, RunLog(), Launcher())
    asyncio.run(save_final(lifecycle, trainer))
    if ends:
        Reporter(config, made.path, "run").finish("done")
    version, folder = find_weights(made.path, config, "last")
    assert (version, folder.name) == (3, "final" if ends else "step_3")
    assert find_weights(made.path, config, "2")[1].name == "step_2"


def test_a_base_model_that_has_changed_is_refused(
    made: MadeRun, tmp_path: Path
) -> None:
    moved = shutil.copytree(made.config.model.path or "", tmp_path / "moved")
    config = made.path / "config.yaml"
    config.write_text(
        config.read_text().replace(str(made.config.model.path), str(moved))
    )
    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    with pytest.raises(
        ConfigError, match=r"not the one that this run began with: config\.json"
    ) as caught:
        made.export(tmp_path / "out")
    assert "--allow-change" not in str(caught.value)


def test_an_export_replaces_nothing(made: MadeRun, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    for out in (made.path, made.path / "inside", tmp_path / "other"):
        with pytest.raises(ConfigError, match="is not empty, or is in"):
            made.export(out)


def test_a_card_has_no_paths_and_no_secrets(
    tiny_model_dir: Path, tmp_path: Path, made: MadeRun
) -> None:
    values = yaml.safe_load((made.path / "config.yaml").read_text())
    values["task"] |= {"args": {"api_key": SECRET}}
    (made.path / "config.yaml").write_text(yaml.safe_dump(values))
    out = made.export(tmp_path / "out", step="2")
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers"
    assert "base_model" not in front, "it was a folder of this machine"
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    for words in (
        "policy_version 2",
        "200 trained tokens",
        "1 observed",
        "Evaluation: 0.500",
    ):
        assert words in card
    written = [
        path.read_text() for path in out.iterdir() if path.suffix in (".md", ".json")
    ]
    for hidden in (
        SECRET,
        str(tmp_path),
        str(tiny_model_dir.parent),
        os.environ.get("HOME", "/root"),
    ):
        assert not any(hidden in text for text in written)


BY_FILE = {"files": ["/home/me/rows.jsonl"], "reward": "/home/me/r.py:f"}
BY_MODEL = {"dataset": "openai/gsm8k", "reward": {"model": {"path": "a/b"}}}
JUDGE = {"model": "m", "prompt": f"{SECRET} {{completion}}"}
BY_JUDGE = {"dataset": "openai/gsm8k", "reward": {"judge": JUDGE}}


@pytest.mark.parametrize(
    ("task", "licence", "rows", "datasets"),
    [
        (BY_FILE, "mit", ["| data | rows.jsonl |", "| reward | r.py:f |"], None),
        (BY_MODEL, "other", ["| data | openai/gsm8k |", "| reward | a/b |"], True),
        (BY_FILE, "apache-2.0", ["| base model | some/model |"], None),
        (BY_JUDGE, "unknown", ["| data | openai/gsm8k |", "| reward | m |"], True),
    ],
)
def test_card_names_what_the_model_was_made_of(
    made: MadeRun,
    tmp_path: Path,
    task: dict[str, Any],
    licence: str,
    rows: list[str],
    datasets: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The licence of a model on the hub is in the snapshot in the cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    is_on_hub = licence == "apache-2.0"
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / commit
    is_of_a_run = licence == "other"
    place = snapshot if is_on_hub else tmp_path / "base"
    place = tmp_path / "first/final" if is_of_a_run else place
    base = shutil.copytree(made.config.model.path or "", place)
    values = yaml.safe_load((made.path / "config.yaml").read_text())
    if is_of_a_run:
        first = values | {"model": values["model"] | {"path": "some/model"}}
        (tmp_path / "first/config.yaml").write_text(yaml.safe_dump(first))
        (tmp_path / "first/run.id").touch()
    values["task"] |= {"size": 1000, "python": None, **task}
    values["model"]["path"] = "some/model" if is_on_hub else str(base)
    (made.path / "config.yaml").write_text(yaml.safe_dump(values))
    if licence in ("mit", "apache-2.0"):
        (base / "README.md").write_text(f"---\nlicense: {licence}\n---\nA model.")
    if is_on_hub:
        pin = ModelPin(made.path, "some/model")
        pin.read(base)
        pin.write()
    if licence != "unknown":
        (base / "LICENSE").write_text("Permission is granted")
    out = made.export(tmp_path / "out", step="2")
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == licence
    assert front.get("datasets") == (["openai/gsm8k"] if datasets else None)
    assert (out / "LICENSE").exists() == (licence != "unknown")
    name = "some/model" if is_on_hub else "base"
    name = "some/model after first" if is_of_a_run else name
    assert f"# {name}, 2 steps of reinforcement learning" in card
    fixed = [f"| base model | {name} |", "| learning rate | 0.003, constant |"]
    for row in [*fixed, *rows, f"| licence | {licence}: see the base model |"]:
        assert row in card
    assert "/home/me" not in card
    assert SECRET not in card


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with FakeHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        threading.Thread(target=hub.serve_forever).start()
        try:
            yield hub
        finally:
            hub.shutdown()


# huggingface_hub 2.4 uploads a file with an argument that its HTTP client replaces
@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
def test_push_uploads_every_file_of_an_export(
    made: MadeRun, tmp_path: Path, hub: FakeHub
) -> None:
    said = list[str]()
    for private, repo in ((True, "me/own"), (False, "me/open"), (False, "me/own")):
        out = tmp_path / f"{private} {repo}"
        made.export(out, push=repo, private=private, tell=said.append)
        kept = {path.name: path.read_bytes() for path in out.iterdir()}
        assert hub.files == kept
        assert {"README.md", "model.safetensors", "reward.png"} <= kept.keys()
        assert not any(TOKEN.encode() in data for data in kept.values())
    assert hub.private == {"me/own": True, "me/open": False}
    assert TOKEN not in "".join(said)


# huggingface_hub 2.4 uploads a file with an argument that its HTTP client replaces
@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("token", "hf auth login"),
        ("rights", "Invalid user token"),
        ("name", "HFValidationError"),
        ("network", "correct OWNER/NAME or the network"),
        ("public", "exists and is public"),
        ("commit", "hf upload me/own"),
        ("file", "hf upload me/own"),
    ],
)
def test_refused_push_names_what_to_do_and_no_token(
    made: MadeRun,
    tmp_path: Path,
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    words: str,
) -> None:
    if fault == "token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setattr(
            "huggingface_hub.constants.HF_TOKEN_PATH", tmp_path / "none"
        )
    if fault == "rights":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
    if fault == "network":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    hub.private["me/own"] = fault != "public"
    hub.refuses = fault
    repo = "me/own/x" if fault == "name" else "me/own"
    out = tmp_path / "out"
    with pytest.raises(AsyncrlError) as caught:
        made.export(out, push=repo, private=True)
    assert words in str(caught.value)
    assert "hf_" not in str(caught.value)
    # Refused before an export that takes minutes, or the export is kept.
    assert out.exists() == (fault in ("commit", "file"))
    assert hub.files == {}


def test_callback_gets_the_export_of_its_checkpoint(
    make_step: MakeStep,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = {"every": 1, "callback": "trackers_for_test:record_export"}
    step = make_step()
    made = MadeRun(tmp_path, tiny_model_dir, checkpoint=section)
    for version in range(2):
        train_versions(step, version, version + 1)
        made.checkpoint(step)
    before = contents(made.path / "checkpoints")
    for version in (1, 2):
        expected = made.export(tmp_path / f"export {version}", step=str(version))
        with contextlib.suppress(SystemExit):  # of version 2
            checkpoint_callback.main(made.path, version)
        weights = (made.path / f"seen_{version}").read_bytes()
        assert weights == (expected / "model.safetensors").read_bytes()
    # Nothing is left of the exports but what the function has kept.
    assert contents(made.path / "checkpoints").keys() == before.keys()
    fatal = find_fatal(capsys.readouterr().err)
    assert fatal is not None
    assert "raised ValueError: no to 2 (trackers_for_test.py line " in fatal.error


@pytest.mark.slow
def test_run_calls_back_for_its_checkpoints_and_outlives_failures(
    tmp_path: Path,
) -> None:
    section = {"every": 2, "callback": "trackers_for_test:record_export"}
    config = write_config(tmp_path, trainer={"num_steps": 2}, checkpoint=section)
    done = run(config, tmp_path / "run")
    assert done.returncode == 0
    final = (tmp_path / "run/final/model.safetensors").read_bytes()
    assert (tmp_path / "run/seen_2").read_bytes() == final
    why = "checkpoint.callback of version 2 failed: raised ValueError: no to 2"
    assert why in done.stdout + done.stderr
    refused = run(
        config, tmp_path / "other", "checkpoint.callback=trackers_for_test:no"
    )
    assert refused.returncode == 2
    assert "checkpoint.callback=trackers_for_test:no cannot be loaded" in refused.stderr


@pytest.mark.parametrize("is_replaced", [True, False])
def test_every_reader_gets_the_template_of_the_run_and_no_absent_code(
    tiny_model_dir: Path, tmp_path: Path, is_replaced: bool
) -> None:
    """transformers before 4.43 and llama.cpp's converter read tokenizer_config.json."""
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    named = base / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("old with tools")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings |= {"chat_template": "old", "auto_map": {"AutoTokenizer": [None, "t.Own"]}}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    template = tmp_path / "new.jinja"
    template.write_text("new {{ messages[0].content }}")
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"auto_map": {"AutoModel": "m.Own"}, "a": 1}')
    given = template if is_replaced else None
    copy_files(base, out, given, [*TOKENIZER, *GENERATION])
    assert json.loads((out / "config.json").read_text()) == {"a": 1}
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (template.read_text() if given else "old")
    assert "auto_map" not in settings
    loaded = PreTrainedTokenizerFast.from_pretrained(out)
    with_tools = loaded.get_chat_template(None, tools=[{"type": "function"}])
    assert with_tools == (template.read_text() if given else "old with tools")
