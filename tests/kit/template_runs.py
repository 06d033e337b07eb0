"""Conversations with the product, each turn compared with the oracle."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from gateway_capture_cases import Message, Play, check_trained, plan
from template_oracle import (
    STORIES,
    TOOLS,
    WITH_THOUGHTS,
    Expected,
    Kind,
    Oracle,
    Refused,
    answer,
    story,
)

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.messages.records import Outcome
from asyncrl.rollouts.tokenizer import HFChatTokenizer

tool_format = functools.cache(partial(find_tool_format, "auto"))
PER_BYTE = "a token per byte"
NEEDS_TOOLS = re.compile("call|results")
SAYS_NO, OMITS, NO_ANSWER = "refuses", "leaves out a message", "leaves out an answer"
"""Why the template ends a story."""


class Told:
    """A story. `ending`: why the template ends it early. `names`: of its deviations."""

    def __init__(
        self,
        oracle: Oracle,
        product: HFChatTokenizer,
        title: str,
        *,
        keeps: bool = True,
    ) -> None:
        self.oracle, self.keeps = oracle, keeps
        thinking = tool_format(product.template).thinking
        self.play = Play(product, thinking, keeps_thoughts=keeps)
        self.tools = TOOLS if NEEDS_TOOLS.search(title) else None
        self.ending = ""
        self.names: set[str] = set()
        self.chat: list[Message] = []
        self.answers: list[tuple[int, list[int]]] = []
        """(place in the chat, ids that were sent and sampled until then), while they
        are unchanged.
        """
        self.carried: set[str] = set()
        self.sampled: list[tuple[list[int], list[int]]] = []
        for number, turn in enumerate(story(title)):
            if turn.change == "edited":  # the answer before it stays
                self.chat[-1] = answer("It is edited.")
                self.answers.pop()
            elif turn.change == "trimmed":
                self.chat = self.chat[2:]
                self.answers.clear()
            self.chat += turn.new
            if not self._asked(f"{title}, turn {number}"):
                break
            ids = oracle.sampled(self.chat, turn, self.tools)
            if PER_BYTE in title:  # ids that no tokenizer would choose
                ids = oracle.per_byte(ids)
            self.play.answer(self.planned, ids, turn.got)
            prompt = self.planned.prompt_ids.tolist()
            self.sampled.append((prompt, ids))
            self.answers.append((len(self.chat), [*prompt, *ids]))
            self.chat.append(turn.back)
        if self.sampled:
            check_trained(self.play.capture.rollout(0, Outcome(), 1.0), self.sampled)

    def _asked(self, place: str) -> bool:
        """Ask for the next prompt; return whether the story continues."""
        self.ending = self._ending()
        try:
            self.planned = plan(self.play.capture, self.chat, self.tools)
        except ValueError as error:
            if not self.ending:
                raise AssertionError(
                    f"{place}: refused only by the product: {error}"
                ) from None
            return False
        if self.ending:
            assert self.ending != OMITS, (
                f"{place}: the template omits a message, and the product continues"
            )
            return False
        expected = Expected(self.oracle.ids(self.oracle.text(self.chat, self.tools)))
        if self.answers:
            try:
                places = [place for place, _ in self.answers]
                kept = self.oracle.expected(
                    self.chat, self.tools, places, self.answers[-1][1]
                )
            except Refused:
                self.ending = NO_ANSWER
                return False
            if self.keeps or kept.names == {"tokens"}:
                expected = kept
        decode = self.oracle.fast.decode
        prompt = self.planned.prompt_ids.tolist()
        assert prompt == expected.ids, (
            f"{place}:\n{decode(prompt)}\nand not\n{decode(expected.ids)}"
        )
        names = set(expected.names - {"tokens"})
        self.carried = (self.carried | names - {"form"} or {"form"}) if names else set()
        match = self.planned.match
        found = set(match.deviations) if match else set()
        assert found == self.carried, (
            f"{place}: {found} are counted, not {self.carried}: {decode(prompt)}"
        )
        self.names |= expected.names
        if not expected.names:
            self.answers.clear()
        return True

    def _ending(self) -> str:
        try:
            text = self.oracle.text(self.chat, self.tools)
        except Refused:
            return SAYS_NO
        is_whole = all(
            each["content"] in text for each in self.chat if each["role"] != "assistant"
        )
        return "" if is_whole else OMITS


def tell(template: str, kind: Kind) -> tuple[dict[str, Told], dict[str, str]]:
    """Return the stories that a template can write, and the faults of the others."""
    if "▁" in template:  # sentencepiece would read it as a space
        kind = kind._replace(base="bytes")
    with tempfile.TemporaryDirectory() as folder:
        try:
            oracle = Oracle(template, kind, Path(folder))
        except Refused as refusal:
            if "bos_token" not in str(refusal):
                return {}, {}
            oracle = Oracle(template, kind._replace(has_bos=True), Path(folder))
        product = HFChatTokenizer(folder)
    told: dict[str, Told] = {}
    wrong: dict[str, str] = {}
    for title in (*STORIES, *WITH_THOUGHTS):
        lacks_tools = not oracle.tools and NEEDS_TOOLS.search(title)
        lacks_end = "other end" in title and not kind.has_several_ends
        if (
            lacks_tools
            or lacks_end
            or ("inline" in title and "<think>" not in template)
        ):
            continue
        try:
            told[title] = Told(oracle, product, title)
            # as_template keeps ids of the template's own text
            if PER_BYTE not in title:
                Told(oracle, product, title, keeps=False)
        except AssertionError as fault:
            wrong[title] = str(fault)
    return told, wrong


def row(template: str, told: dict[str, Told], wrong: Iterable[str] = ()) -> list[str]:
    """Return a row of docs/templates.csv without the template's name."""
    form = tool_format(template)
    stories = {title: each for title, each in told.items() if "other end" not in title}
    thoughts = [
        title
        for title in WITH_THOUGHTS
        if title in stories and "thought" in stories[title].names
    ]
    names = {
        name
        for title, each in stories.items()
        if title not in thoughts
        for name in each.names
    }
    known = [
        *sorted(names - {"tokens", "end_token"}),
        *(f"wrong: {title}" for title in wrong),
    ]
    endings = [
        f"{title} ({each.ending})" for title, each in stories.items() if each.ending
    ]
    if not any(NEEDS_TOOLS.search(title) for title in stories):
        endings.append("tools")
    return [
        "none" if form.refusal else form.name,
        "stripped" if thoughts else "kept",
        "no" if known else "yes" * bool(told),
        "; ".join(known),
        "; ".join(endings) if told else "all",
    ]
