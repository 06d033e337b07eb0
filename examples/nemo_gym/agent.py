"""An environment of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym) by HTTP: rows of its
JSONL files, its resources server for tools and the reward, and the session's
/v1/responses as the model.

The calls are those of NeMo Gym's simple_agent: /seed_session, one route per tool, then
/verify, with the cookies of the session. Start the resources server with NeMo Gym's
own command, and give its address:

    asyncrl run examples/nemo_gym/nemo_gym.yaml generator.args.url=http://127.0.0.1:8001
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from asyncrl.agents import Outcome, Session, Task
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item


class Rows:
    """Rows of a NeMo Gym file, each with its `responses_create_params`."""

    def __init__(self, *, path: str, seed: int, size: int | None = None) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line) for line in lines][:size]

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Item:
        row = self._rows[index]
        asked = row["responses_create_params"]["input"]
        text = asked if isinstance(asked, str) else asked[-1]["content"]
        return Item(text, info={"row": row})

    def score(self, prompt: Prompt, completion: str) -> float:
        raise ValueError("/verify of the resources server gives the reward")


async def run(task: Task, session: Session, *, url: str, max_steps: int = 8) -> Outcome:
    row = dict(task.info["row"])
    params = dict(row["responses_create_params"])
    asked = params["input"]
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    said: list[dict[str, Any]] = []
    num_calls = 0
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as server:
        seeded = await server.post("/seed_session", json=row)
        seeded.raise_for_status()
        for _ in range(max_steps):
            answer = await session.client.responses.create(
                model=session.model,
                input=[*messages, *said],
                tools=params.get("tools") or [],
            )
            output = [item.model_dump(exclude_none=True) for item in answer.output]
            said += output
            calls = [item for item in output if item["type"] == "function_call"]
            if not calls or answer.incomplete_details is not None:
                break
            for call in calls:
                num_calls += 1
                said.append(await result_of(server, call))
        response = answer.model_dump() | {"output": said}
        verified = await server.post("/verify", json={**row, "response": response})
        verified.raise_for_status()
    return Outcome(float(verified.json()["reward"]), {"tool_calls": num_calls})


async def result_of(server: httpx.AsyncClient, call: dict[str, Any]) -> dict[str, Any]:
    """Return the tool's answer; an error is text for the model, too."""
    try:
        arguments = json.loads(call["arguments"])
    except ValueError as error:
        text = f"The arguments are not JSON: {error}"
    else:
        text = (await server.post(f"/{call['name']}", json=arguments)).text
    return {"type": "function_call_output", "call_id": call["call_id"], "output": text}
