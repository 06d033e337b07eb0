"""OpenHands' SDK with its own prompt and condenser, which summarizes the conversation after an overflow."""

import os
from pathlib import Path

from framework_tasks import QUESTION, add_up
from openhands.sdk import (
    LLM,
    Action,
    Agent,
    Conversation,
    LLMSummarizingCondenser,
    MessageEvent,
    Observation,
    TextContent,
    Tool,
    ToolDefinition,
    register_tool,
)
from openhands.sdk.tool import ToolExecutor

calls = []


class Numbers(Action):
    a: int
    b: int


class Total(Observation):
    total: str = ""

    @property
    def to_llm_content(self):
        return [TextContent(text=self.total)]


class Adds(ToolExecutor):
    def __init__(self, is_long):
        self.is_long = is_long

    def __call__(self, action, conversation=None):
        return Total(total=add_up(calls, action.a, action.b, self.is_long))


class AddTool(ToolDefinition[Numbers, Total]):
    name = "add"

    @classmethod
    def create(cls, conv_state, is_long=False):
        adds = Adds(is_long)
        return [
            cls(description="Add two numbers.", action_type=Numbers, observation_type=Total, executor=adds)
        ]


register_tool("add", AddTool)


def calculate(is_long):
    llm = LLM(
        model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    condenser = LLMSummarizingCondenser(llm=llm)
    agent = Agent(llm=llm, tools=[Tool(name="add", params={"is_long": is_long})], condenser=condenser)
    conversation = Conversation(agent=agent, workspace=Path.cwd(), visualizer=None)
    conversation.send_message(QUESTION)
    conversation.run()
    last = [event for event in conversation.state.events if isinstance(event, MessageEvent)][-1]
    return [last.llm_message.content[0].text, len(calls)]


def tools():
    return calculate(is_long=False)


def overflow():
    return calculate(is_long=True)
