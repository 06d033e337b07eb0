"""langchain: its agent (on langgraph), and with_structured_output in each of its methods."""

from framework_tasks import QUESTION, City
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def calculator(**more):
    calls = []

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    agent = create_agent(ChatOpenAI(model="policy", **more), tools=[add], system_prompt="Be brief.")
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    return [state["messages"][-1].text, len(calls)]


def tools():
    return calculator()


def streamed_tools():
    return calculator(streaming=True)


def responses_tools():
    return calculator(use_responses_api=True)


def structured(method):
    llm = ChatOpenAI(model="policy").with_structured_output(City, method=method)
    return llm.invoke("Paris?").model_dump()


def json_schema():
    return structured("json_schema")


def function_calling():
    return structured("function_calling")


def json_mode():
    return structured("json_mode")
