"""Reward models: real servers, compared with plain transformers, and real runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import job_runs
import pytest
import torch
import yaml
from crash_fuzz import killed_on_the_way
from engine_processes import SECRET, engine_process
from hypothesis import given
from hypothesis import strategies as st
from launch_cases import single_node
from safetensors.torch import load_file, save_file
from scorer_cases import PROMPT, TOKENIZER, sampled
from scoring_cases import (
    PAIRS,
    SECTIONS,
    chat,
    make_decoder,
    spec_of,
    without_template,
)
from tiny_model import make_tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from asyncrl.base.errors import ConfigError, RequestRefused, find_fatal
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig, TaskConfig
from asyncrl.config.load import checked
from asyncrl.engines.role_client import RoleClient, least_busy
from asyncrl.extensions.scoring.reward_client import RewardModelClient, find_label
from asyncrl.extensions.scoring.reward_model_config import RewardModelConfig
from asyncrl.extensions.scoring.scoring_rules import model_of
from asyncrl.job.check.config_check import check_lines, validate
from asyncrl.messages.records import Prompt
from asyncrl.tasks import TaskScorer, build_task
from asyncrl_servers.scoring.reward_model import cut_batches

# one process imports the modules that they fork
pytestmark = [
    pytest.mark.extension("scoring"),
    pytest.mark.xdist_group("forks"),
]


def make_encoder(folder: Path, kind: str) -> Path:
    make_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.3,
        "num_labels": 3,
        "id2label": {0: "bad", 1: "fair", 2: "good"},
    }
    torch.manual_seed(3)
    model = (
        BertForSequenceClassification(BertConfig(**shape))
        if kind == "bert"
        else RobertaForSequenceClassification(RobertaConfig(**shape))
    )
    model.save_pretrained(folder)
    return folder


def plain_ids(tokenizer: Any, reads: str, prompt: Prompt, completion: str) -> Any:
    if reads == "chat":
        messages = [*prompt.messages, {"role": "assistant", "content": completion}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")
    texts = [completion]
    if reads == "pair":
        texts = [prompt.messages[0]["content"], completion]
    return tokenizer(*texts, return_tensors="pt")


def plain_score(folder: Path, reads: str, prompt: Prompt, completion: str) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**plain_ids(tokenizer, reads, prompt, completion)).logits[0]


@asynccontextmanager
async def client_of(url: str, **values: Any) -> AsyncIterator[RewardModelClient]:
    caller = Caller("reward", url, SECRET)
    yield RewardModelClient(caller, RewardModelConfig(path="m", **values))
    await caller.aclose()


@pytest.mark.parametrize(
    ("kind", "pad", "reads", "label"),
    [
        ("decoder", None, "chat", 0),
        ("decoder", "end", "chat", 0),
        ("decoder", "pad", "completion", 0),
        ("bert", "pad", "pair", 2),
        ("roberta", "pad", "completion", 1),
    ],
)
def test_scores_equal_plain_transformers_in_every_batch(
    kind: str, pad: str | None, reads: str, label: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if kind == "decoder":
        make_decoder(folder, pad)
    else:
        make_encoder(folder, kind)
    expected = [float(plain_score(folder, reads, *pair)[label]) for pair in PAIRS]
    assert max(expected) - min(expected) > 0.01

    async def story(url: str) -> list[list[float]]:
        async with client_of(url, mean=0.5, std=2.0) as client:
            alone = [await client.score(*pair) for pair in PAIRS]
            assert (await client.sleep()).num_bytes > 0
            await client.wake()
            many = await asyncio.gather(*(client.score(*pair) for pair in PAIRS * 3))
            assert client.gauges()["reward/texts"] == 4 * len(PAIRS)
        return [alone, many[:5], many[5:10], many[10:]]

    spec = spec_of(folder, reads=reads, label=label, aside_dir=str(tmp_path))
    with engine_process("scoring.reward_model", spec, tmp_path) as server:
        alone, *batched = asyncio.run(story(server.url))
    unscaled = [0.5 + 2.0 * score for score in alone]
    assert unscaled == pytest.approx(expected, abs=1e-5)
    assert batched == [alone] * 3, "the same bits, whatever is asked at the same time"


def test_text_beyond_the_context_fails_only_its_rollout(tmp_path: Path) -> None:
    # RoBERTa's first position is that after the padding's: 0 of 128.
    folder = make_encoder(tmp_path / "model", "roberta")
    pad_id = RobertaConfig.from_pretrained(folder).pad_token_id
    longest = 128 - (pad_id + 1)

    async def story(url: str) -> None:
        async with client_of(url) as client:
            whole = await client.score(chat("a"), "b" * longest)
            assert whole == pytest.approx(
                float(plain_score(folder, "completion", chat("a"), "b" * longest)[0]),
                abs=1e-5,
            )
            for text in ("b" * (longest + 1), ""):
                said = f"has {len(text)} tokens .*, which reads 1 to {longest}"
                with pytest.raises(RequestRefused, match=said):
                    await client.score(chat("a"), text)

    spec = spec_of(folder, reads="completion")
    with engine_process("scoring.reward_model", spec, tmp_path) as server:
        asyncio.run(story(server.url))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(1, 100),
)
def test_batches_keep_the_limit_of_tokens(lengths: list[int], limit: int) -> None:
    texts: list[Any] = [({"input_ids": [0] * num}, None) for num in lengths]
    batches = [
        [len(text["input_ids"]) for text, _ in batch]
        for batch in cut_batches(texts, limit)
    ]
    assert sorted(itertools.chain(*batches)) == sorted(lengths)
    for batch in batches:
        assert len(batch) == 1 or max(batch) * len(batch) <= limit
    for batch, following in itertools.pairwise(batches):
        assert batch[0] * (len(batch) + 1) > limit, "the next would have fitted"
        assert batch[-1] >= following[0]


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_head, "has no weights score.weight"),
        (without_template, "has no chat template"),
        (without_weights, "cannot load the reward model"),
    ],
)
def test_model_that_cannot_score_ends_the_start(
    spoil: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    folder = make_decoder(tmp_path / "model", None)
    spoil(folder)
    with engine_process("scoring.reward_model", spec_of(folder), tmp_path) as server:
        assert server.process.wait(120) == 1
        fatal = find_fatal(server.read_log())
    assert fatal is not None
    assert words in fatal.error


@pytest.mark.asyncio
async def test_reward_model_of_the_page(tmp_path: Path) -> None:
    (text,) = (section for section in SECTIONS if "model:\n      path:" in section)
    config = TaskConfig.model_validate(yaml.safe_load(text)["task"])
    model = model_of(config)
    assert model is not None
    folder = make_decoder(tmp_path / "model", "pad")
    logit = float(plain_score(folder, model.reads, PROMPT, "yes")[0])
    spec = spec_of(folder, reads=model.reads)
    with engine_process("scoring.reward_model", spec, tmp_path) as server:
        async with client_of(server.url, mean=model.mean, std=model.std) as client:
            task = build_task(config, 0)
            scorer = TaskScorer(
                task, config, TOKENIZER, seed=0, clients_of=lambda _: [client]
            )
            reward = await scorer.score(PROMPT, sampled("yes"))
            await scorer.aclose()
    assert reward == pytest.approx((logit - model.mean) / model.std, abs=1e-5)


class OpenCalls(RoleClient):
    """Answers its calls when the test says so."""

    def __init__(self, name: str) -> None:
        super().__init__(Caller(name, "", ""), places=8)
        self.may_answer = asyncio.Event()

    async def ask(self) -> None:
        await self.repeat("an answer", self.may_answer.wait)


@pytest.mark.asyncio
async def test_copies_share_the_calls() -> None:
    copies = [OpenCalls("reward-0"), OpenCalls("reward-1")]
    async with asyncio.TaskGroup() as calls:
        for _ in range(6):
            calls.create_task(least_busy(copies).ask())
            await asyncio.sleep(0)
        assert [copy.num_calls for copy in copies] == [3, 3]
        # Calls go to the other while one restarts.
        copies[0].disconnect_nowait()
        for _ in range(2):
            calls.create_task(least_busy(copies).ask())
            await asyncio.sleep(0)
        assert [copy.num_calls for copy in copies] == [3, 5]
        for copy in copies:
            copy.may_answer.set()
    assert [copy.num_calls for copy in copies] == [0, 0]


# ---- the config

SCRATCH = job_runs.CONFIG["model"]["scratch"]
CHARACTERS = "".join(map(chr, range(32, 127)))
ROWS = "examples/data/capitals.jsonl"
ONE_LABEL = {"id2label": {"0": "LABEL_0"}}


def config_of(folder: str, *, placement: object = "auto", **values: Any) -> RunConfig:
    task = {"files": [ROWS], "reward": {"model": {"path": folder, **values}}}
    return checked(
        RunConfig,
        {
            "model": {"scratch": {**SCRATCH, "characters": CHARACTERS}},
            "rollout": {**job_runs.CONFIG["rollout"], "max_prompt_tokens": 64},
            "task": task,
            "placement": {"reward": placement},
        },
    )


@pytest.mark.parametrize(
    ("label", "architecture", "found"),
    [
        (None, ONE_LABEL, 0),
        ("good", {"id2label": {"0": "bad", "1": "good"}}, 1),
        (0, {"id2label": {"0": "bad", "1": "good"}}, 0),
        (1, {}, 1),
    ],
)
def test_label_is_found_by_name_or_number(
    label: str | int | None, architecture: dict[str, Any], found: int
) -> None:
    config = RewardModelConfig(path="m", label=label)
    kinds = {"architectures": ["BertForSequenceClassification"]}
    assert find_label(config, kinds | architecture) == found


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (None, "label=none: .* has 3 labels: bad, fair, good"),
        ("great", "label=great: .* has 3 labels"),
        (3, "label=3: .* has 3 labels"),
    ],
)
def test_unknown_label_is_refused_before_training(
    label: str | int | None, words: str, tmp_path: Path
) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    with pytest.raises(ConfigError, match=words):
        validate(config_of(str(folder), label=label, reads="pair"))


def test_language_model_is_no_reward_model(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="is Qwen3ForCausalLM"):
        validate(config_of(str(tiny_model_dir)))


def test_check_plans_the_memory_of_the_reward_model(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model", None)
    lines = "\n".join(check_lines(config_of(str(folder)), single_node()))
    assert f"reward model: {folder}, the logit 0" in lines
    (row,) = re.findall(r"^reward  .*", lines, flags=re.M)
    assert row.count("iB") == 3, "weights, a batch, and both"


# ---- runs


def rewards_of(run_dir: Path) -> list[float]:
    return [
        step["reward/mean"] for step in job_runs.read_lines(run_dir / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_rollouts_get_the_same_rewards_despite_kills(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "scorer", None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{a} 2"}) for a in "abcdefgh"))
    path = job_runs.write_config(
        tmp_path, trainer={"num_steps": 16}, checkpoint={"every": 4}
    )
    config = yaml.safe_load(path.read_text())
    config["task"] = {
        "files": [str(rows)],
        "answer_column": "none",
        "reward": {"model": {"path": str(folder)}},
    }
    path.write_text(yaml.safe_dump(config))
    quiet, run_dir = tmp_path / "quiet", tmp_path / "run"
    assert job_runs.run(path, quiet).returncode == 0
    config["placement"] = config.get("placement", {}) | {"reward": ["cpu", "cpu"]}
    path.write_text(yaml.safe_dump(config))

    def without_its_reward_model() -> subprocess.Popen[str]:
        process = job_runs.start(path, run_dir)
        job_runs.wait_for_steps(run_dir, 1, process)
        (server,) = job_runs.children_of(process, "reward-1")
        server.kill()
        return process

    killed_on_the_way(
        without_its_reward_model, lambda: len(rewards_of(run_dir)) >= 6, run_dir
    )
    ended = job_runs.run(path, run_dir)
    assert ended.returncode == 0, ended.stderr
    # On-policy, so that equal rewards mean equal weights.
    assert rewards_of(run_dir) == pytest.approx(rewards_of(quiet), abs=1e-6)
    assert len(set(rewards_of(run_dir))) > 8
    last = job_runs.read_lines(quiet / "metrics.jsonl")[-1]
    assert last["reward/texts"] == 16 * 16, "each rollout is scored once"
    for copy in range(2):
        assert (run_dir / "logs" / f"reward-{copy}.log").is_file()
