"""A search agent in the style of Search-R1: the model asks a search tool until it can
answer; the reward is an exact match.

    pip install -e '.[train,harness]'
    asyncrl run examples/search/search.yaml

The corpus lies beside this file; another one is a JSON-lines file of `title` and `text`
(generator.args.corpus).
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.agents import Outcome, Session, Task

HERE = Path(__file__).parent
SYSTEM = (
    "Answer the question. Use the search tool for what you do not know; you may search again. "
    "Give the final answer, a few words at most, between <answer> and </answer>."
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds passages of an encyclopedia.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
]
EXAMPLES = (
    ("What is the birthplace of Ada Brook?", "birthplace of Ada Brook", "Dublin"),
    ("What is the pet of Paul Stone?", "pet of Paul Stone", "mule"),
    ("What is the job of Emma Wood?", "job of Emma Wood", "cook"),
)
"""Questions, what was searched for, answers: nobody of them is in people.jsonl."""


async def run(
    task: Task,
    session: Session,
    *,
    corpus: str = "",
    num_passages: int = 2,
    max_searches: int = 3,
    must_search: bool = False,
    is_shaped: bool = False,
    num_examples: int = 0,
    system: str = SYSTEM,
) -> Outcome:
    """Search and answer. `must_search`: the first turn is a call whatever the model
    would rather do, which helps a small model begin; so does `num_examples`: so many of
    EXAMPLES stand before the question.

    The reward is 1 for a right answer, 0 for a wrong one. A small share for form keeps
    a model that never answers from standing still. `is_shaped`: instead of that share,
    0.1 for passages that hold the answer, and up to 0.6 for a right answer among other
    words, with or without tags: the fewer others, the more.
    """
    index = open_index(corpus)
    messages: list[Any] = [
        {"role": "system", "content": system},
        *examples(num_examples),
        *task.messages,
    ]
    num_searches, found, answer, said = 0, False, None, ""
    for turn in range(max_searches + 1):
        choice: Any = "auto" if turn < max_searches else "none"
        if must_search and turn == 0:
            choice = {"type": "function", "function": {"name": "search"}}
        completion = await session.client.chat.completions.create(
            model=session.model, messages=messages, tools=TOOLS, tool_choice=choice
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            said = message.content or ""
            answer = final_answer(said)
            break
        for call in message.tool_calls:
            passages = index.search(
                query_of(call.function.name, call.function.arguments), num_passages
            )
            found = found or any(mentions(passages, right) for right in task.answer)
            num_searches += 1
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": passages}
            )
    is_right = answer is not None and any(
        normalised(answer) == normalised(right) for right in task.answer
    )
    reward = 1.0 if is_right else 0.1 if answer is not None else 0.0
    if is_shaped and not is_right:
        said = said if answer is None else answer
        reward = 0.1 * found + 0.6 * max(share_of(right, said) for right in task.answer)
    return Outcome(
        reward,
        {
            "searches": num_searches,
            "found": float(found),
            "answered": float(answer is not None),
            "right": float(is_right),
        },
    )


def examples(number: int) -> Iterator[Any]:
    """Conversations as they should go. Nothing of them was sampled, so none of it is
    trained on.
    """
    for index, (question, query, answer) in enumerate(EXAMPLES[:number]):
        function = {"name": "search", "arguments": json.dumps({"query": query})}
        call = {"id": f"example-{index}", "type": "function", "function": function}
        yield {"role": "user", "content": question}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        yield {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": f"The {query}: {answer}.",
        }
        yield {"role": "assistant", "content": f"<answer>{answer}</answer>"}


def parse(text: str) -> list[tuple[str, dict[str, str]]] | None:
    """Searches as Search-R1 writes them, <search>query</search>: gateway.tool_format of
    learn.yaml.
    """
    queries: list[str] = re.findall(r"<search>(.*?)</search>", text, flags=re.DOTALL)
    return [("search", {"query": query}) for query in queries] or None


class Index:
    """BM25 over the passages of a file."""

    def __init__(self, path: Path) -> None:
        import bm25s

        self._bm25s = bm25s
        self._passages = [
            json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
        ]
        texts = [f"{passage['title']}. {passage['text']}" for passage in self._passages]
        self._bm25 = bm25s.BM25()
        self._bm25.index(
            bm25s.tokenize(texts, stopwords="en", show_progress=False),
            show_progress=False,
        )

    def search(self, query: str, num_passages: int) -> str:
        """The best passages as text for the model."""
        words = self._bm25s.tokenize(
            query, stopwords="en", return_ids=False, show_progress=False
        )
        if not words[0]:
            return "No passage found."
        numbers, scores = self._bm25.retrieve(
            words, k=min(num_passages, len(self._passages)), show_progress=False
        )
        found = [
            self._passages[number]
            for number, score in zip(numbers[0], scores[0], strict=True)
            if score > 0
        ]
        return (
            "\n".join(f"{passage['title']}: {passage['text']}" for passage in found)
            or "No passage found."
        )


@functools.cache
def open_index(corpus: str) -> Index:
    """The index of a file, made once a worker."""
    return Index(Path(corpus) if corpus else HERE / "corpus.jsonl")


def query_of(name: str, arguments: str) -> str:
    """The query of a call; empty if it is no search."""
    query = json.loads(arguments).get("query")
    return query if name == "search" and isinstance(query, str) else ""


def final_answer(text: str) -> str | None:
    """What stands in the last <answer>; None if there is none."""
    answers: list[str] = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return answers[-1].strip() if answers else None


def share_of(right: str, said: str) -> float:
    """Of the words that were said, those of the right answer, 0 to 1; 0 if it is not
    among them.
    """
    words, wanted = normalised(said), normalised(right)
    return (
        len(wanted.split()) / len(words.split())
        if f" {wanted} " in f" {words} "
        else 0.0
    )


def mentions(passages: str, answer: str) -> bool:
    """Whether the passages hold the answer."""
    return normalised(answer) in normalised(passages)


def normalised(text: str) -> str:
    """As exact match is measured on question answering: no case, punctuation, articles,
    or more than one space.
    """
    plain = "".join(
        character for character in text.lower() if character not in string.punctuation
    )
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))
