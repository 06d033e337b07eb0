"""The one-word questions: what is held out is not trained on, and no reward is had by talking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_tasks_examples import ROOT

from examples.words import exact, shortest, words_of


def rows(name: str) -> list[dict[str, str]]:
    """The last question of each chat, with its answer."""
    path: Path = ROOT / "examples" / "data" / f"{name}.jsonl"
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row["prompt"][-1]["content"], "answer": row["answer"]} for row in found]


def test_no_question_holds_its_answer_and_what_is_held_out_is_asked_nowhere_else() -> None:
    trained, held_out = rows("words"), rows("words_held_out")
    assert not {row["prompt"] for row in trained} & {row["prompt"] for row in held_out}
    assert len({row["prompt"] for row in trained}) == len(trained)
    for row in [*trained, *held_out]:
        assert words_of(row["answer"]) == [row["answer"].lower()]
        assert row["answer"].lower() not in words_of(row["prompt"]), row
        assert exact(None, f" {row['answer']}.\n", row["answer"]) == 1.0


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Mice", 1.0),
        ('"mice".', 1.0),
        ("mice mice", 0.5),
        ("The plural of mouse is mice.", 1 / 6),
        ("What is the plural of mouse?", 0.0),
        ("mouses, mice, mouse", 1 / 3),
        ("micey", 0.0),
        ("", 0.0),
    ],
)
def test_the_right_word_counts_the_less_the_more_stands_around_it(said: str, reward: float) -> None:
    assert shortest(None, said, "mice") == pytest.approx(reward)
    assert exact(None, said, "mice") == float(reward == 1.0)
