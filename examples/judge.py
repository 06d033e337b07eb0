"""A judge's grade as the reward: a second model, behind any server with the OpenAI API,
grades each summary.

    pip install -e '.[vllm,harness]'
    export JUDGE_URL=http://HOST:8000/v1 JUDGE_KEY=none JUDGE_MODEL=NAME      # for example `vllm serve NAME`
    asyncrl run examples/judge.yaml

docs/rewards.md explains how a policy can fool a judge, and task.reward.judge, which
needs no code.
"""

from __future__ import annotations

import os
import re

from openai import AsyncOpenAI

from asyncrl.messages.records import Prompt

QUESTION = """Question: {question}
Reference answer: {reference}
Answer: {answer}
Does the answer agree with the reference? Reply with one number from 0 (not at all) to 10 (fully)."""


async def judged(prompt: Prompt, completion: str, answer: str) -> float:
    """Return the judge's grade from 0 to 1. A reply without a grade raises, which fails
    the rollout.
    """
    question = prompt.messages[-1]["content"]
    text = QUESTION.format(question=question, reference=answer, answer=completion)
    async with AsyncOpenAI(
        base_url=os.environ["JUDGE_URL"], api_key=os.environ["JUDGE_KEY"]
    ) as client:
        reply = await client.chat.completions.create(
            model=os.environ["JUDGE_MODEL"],
            messages=[{"role": "user", "content": text}],
            temperature=0.0,
        )
    grade = re.fullmatch(r"\s*(10|\d)\s*", reply.choices[0].message.content or "")
    if grade is None:
        raise ValueError(f"the judge replied {reply.choices[0].message.content!r}")
    return int(grade[1]) / 10
