"""OpenHands' SDK with its own prompt, its tools, and its condenser, which summarizes
after an overflow.
"""

import os

from framework_tasks import QUESTION
from openhands.sdk import (
    LLM,
    Agent,
    Conversation,
    LLMSummarizingCondenser,
    MessageEvent,
)


def think():
    llm = LLM(
        model="openai/policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = Agent(llm=llm, tools=[], condenser=LLMSummarizingCondenser(llm=llm))
    conversation = Conversation(agent=agent, workspace=".", visualizer=None)
    conversation.send_message(QUESTION)
    conversation.run()
    events = conversation.state.events
    said = [
        event.llm_message.content[0].text
        for event in events
        if isinstance(event, MessageEvent)
    ]
    return [
        said[-1],
        sum(type(event).__name__ == "ObservationEvent" for event in events),
    ]
