"""langchain: its agent (on langgraph), and with_structured_output in each of its
methods.
"""

from framework_tasks import QUESTION, City, add_up
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def calculator(is_long=False, **more):
    calls = []

    @tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return add_up(calls, a, b, is_long)

    llm = ChatOpenAI(model="policy", **more)
    agent = create_agent(llm, tools=[add], system_prompt="Be brief.")
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    return [state["messages"][-1].text, len(calls)]


def tools():
    return calculator()


def streamed_tools():
    return calculator(streaming=True)


def responses_tools():
    return calculator(use_responses_api=True)


def overflow():
    try:
        return calculator(is_long=True)
    except ContextOverflowError:  # which langchain's middleware summarizes
        return ["ContextOverflowError"]


def structured(method):
    llm = ChatOpenAI(model="policy").with_structured_output(City, method=method)
    return llm.invoke("Paris?").model_dump()


def json_schema():
    return structured("json_schema")


def function_calling():
    return structured("function_calling")


def json_mode():
    return structured("json_mode")
