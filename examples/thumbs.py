"""An application that shows answers to people, and posts their thumbs as rewards hours
later.

    asyncrl run examples/thumbs.yaml            # answers go to thumbs.sqlite
    python examples/thumbs.py thumbs.sqlite     # asks for a thumb for each of them

The run and the application share only the database and the endpoint's port. Either may
be stopped and started again at any time.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from asyncrl.agents import Session, Task

TABLE = """CREATE TABLE IF NOT EXISTS answers (
    outcome_key TEXT PRIMARY KEY, outcome_url TEXT, question TEXT, answer TEXT, said TEXT
)"""
REPEATED = (429, 502, 503, 504)
PAUSE_S = 5.0


@contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, timeout=60.0)) as answers, answers:
        answers.execute(TABLE)
        yield answers


async def answer(task: Task, session: Session, *, path: str) -> None:
    """Answer a question, and keep the answer with the key of its reward."""
    completion = await session.client.chat.completions.create(
        model=session.model,
        messages=list(task.messages),  # type: ignore[arg-type]
    )
    text = completion.choices[0].message.content or ""
    url = f"{session.base_url}/outcome"
    question = task.messages[-1]["content"]
    with opened(path) as answers:
        row = (session.outcome_key, url, question, text)
        answers.execute("INSERT INTO answers VALUES (?, ?, ?, ?, NULL)", row)


def post(url: str, key: str, reward: float) -> str:
    """Post a reward until the run has taken or refused it; return its answer."""
    body = json.dumps({"reward": reward}).encode()
    while True:
        request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=60.0):
                return "accepted"
        except urllib.error.HTTPError as refused:
            if refused.code not in REPEATED:
                return f"{refused.code}: {refused.read().decode()}"
        except OSError:
            pass  # the run is down, and will be resumed
        time.sleep(PAUSE_S)


def rate(path: str, is_good: Callable[[str, str], bool]) -> int:
    """Post a thumb for each unrated answer; return their number."""
    with opened(path) as answers:
        rows = answers.execute("SELECT * FROM answers WHERE said IS NULL").fetchall()
    for key, url, question, text, _ in rows:
        said = post(url, key, float(is_good(question, text)))
        # A crash before this line posts the same reward again, which counts once.
        with opened(path) as answers:
            values = (said, key)
            answers.execute("UPDATE answers SET said = ? WHERE outcome_key = ?", values)
    return len(rows)


if __name__ == "__main__":
    rate(sys.argv[1], lambda question, text: input(f"{question}\n{text}\n+? ") == "+")
