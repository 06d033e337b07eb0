"""`asyncrl export --samples`: rollouts of a journal as demonstrations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from job_runs import CONFIG
from token_cases import masked_tokens
from typer.testing import CliRunner

from asyncrl.base.errors import ConfigError
from asyncrl.cli import app
from asyncrl.extensions.sft.demonstrations import read_demonstrations
from asyncrl.extensions.sft.sft_config import DataConfig
from asyncrl.job.sample_export import export_samples
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import GroupId, Prompt, Ticket, Trajectory
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.extension("sft")

PROMPT = Prompt("0/0", ({"role": "user", "content": "ab"},))


def trajectory_of(
    tokenizer: HFChatTokenizer,
    index: int,
    answer: str,
    reward: float,
    *,
    is_truncated: bool = False,
) -> Trajectory:
    prompt = tokenizer.encode_chat(PROMPT.messages)
    end = () if is_truncated else tuple(tokenizer.end_ids)[:1]
    sampled = (*tokenizer.encode(answer), *end)
    mask = np.arange(len(prompt) + len(sampled)) >= len(prompt)
    tokens = masked_tokens([*prompt, *sampled], mask, np.zeros(len(mask)))
    return Trajectory(index, tokens, reward=reward, is_truncated=is_truncated)


@pytest.fixture
def run_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A run with one group: two good rollouts, which are equal, and four others."""
    folder = tmp_path / "run"
    folder.mkdir()
    model = {"path": str(tiny_model_dir)}
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "model": model}))
    tokenizer = HFChatTokenizer(tiny_model_dir)

    async def write() -> None:
        journal = Journal(folder / "journal.sqlite", run_id="r")
        journal.add_admission_nowait(Ticket(GroupId(0), 0), PROMPT)
        for number, (answer, reward, is_truncated) in enumerate(
            [
                ("cd", 1.0, False),
                ("cd", 1.0, False),
                ("bad", 0.5, False),
                ("long", 1.0, True),
                ("", 1.0, False),
            ]
        ):
            made = trajectory_of(
                tokenizer, number, answer, reward, is_truncated=is_truncated
            )
            journal.add_rollout_nowait(GroupId(0), (made,))
        journal.end_group_nowait(GroupId(0), "ready", "")
        await journal.aclose()

    asyncio.run(write())
    return folder


def test_good_rollouts_become_demonstrations(
    run_dir: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "good.jsonl"
    arguments = ["export", str(run_dir), str(out), "--samples", "--min-reward", "0.9"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.startswith("1 rollouts:")
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["messages"] == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
    ]
    tokenizer = HFChatTokenizer(tiny_model_dir)
    (tokens,) = read_demonstrations(DataConfig(files=[str(out)]), tokenizer, None).rows
    # The tokens of the rollout; the sampled ones are learned.
    rollout = trajectory_of(tokenizer, 0, "cd", 1.0).tokens
    assert tokens.ids.tolist() == rollout.ids.tolist()
    assert tokens.is_sampled.tolist() == rollout.is_sampled.tolist()


def test_export_without_good_rollouts_is_refused(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "good.jsonl"
    with pytest.raises(ConfigError, match="no whole rollout with a reward of at least"):
        export_samples(run_dir, out, min_reward=1.5)
    assert not out.exists()
    out.write_text("")
    with pytest.raises(ConfigError, match=r"good.jsonl exists"):
        export_samples(run_dir, out, min_reward=0.5)
    (run_dir / "journal.sqlite").unlink()
    with pytest.raises(ConfigError, match="has no journal"):
        export_samples(run_dir, tmp_path / "other.jsonl", min_reward=0.5)


def test_options_of_samples_come_together(run_dir: Path) -> None:
    good = ["--samples", "--min-reward", "0.9"]
    for option in (
        good[:1],
        good[1:],
        [*good, "--step", "best"],
        [*good, "--adapter"],
        [*good, "--traces"],
        [*good, "--push", "me/good"],
        ["--private"],
    ):
        arguments = ["export", str(run_dir), "out.jsonl", *option]
        assert CliRunner().invoke(app, arguments).exit_code == 2
