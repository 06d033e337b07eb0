"""OpenEnv's own harness as the agent: it plays an environment of tools, and the model
behind it is the session's. With openenv 0.10. A program of `generator.command`:

    generator:
      command: [python, examples/openenv/own_harness.py, "http://127.0.0.1:8000"]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    StepEnvSessionAdapter,
)
from openenv.core.harness.collect import build_model_step
from openenv.core.llm_client import OpenAIClient

MAX_TURNS = 8


def play(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return the outcome of one episode."""
    model = OpenAIClient(
        os.environ["OPENAI_BASE_URL"],
        None,
        os.environ["OPENAI_MODEL"],
        api_key=os.environ["OPENAI_API_KEY"],
        temperature=1.0,  # the client's default is greedy
        max_tokens=1024,
    )
    client = GenericEnvClient(url).sync()
    client.connect()
    tools = [
        Tool(
            name=tool["name"],
            description=tool["description"],
            input_schema=tool["input_schema"],
        )
        for tool in client.step({"type": "list_tools"}).observation["tools"]
    ]
    session = StepEnvSessionAdapter(
        client,
        tool_specs=tools,
        action_builder=action_of,
        initial_messages_builder=lambda _result, _task: messages,
    )
    try:
        limits = HarnessRunLimits(max_turns=MAX_TURNS)
        step = build_model_step(model)
        rollout = MCPHarnessAdapter().run_white_box(step, session, limits)
        verified = session.verify(rollout.messages)
    finally:
        session.close()
    return {
        "reward": verified.env_reward or 0.0,
        "metrics": {name: rollout.metrics[name] for name in ("turns", "tool_calls")},
    }


def action_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(play(sys.argv[1], task["messages"])))
