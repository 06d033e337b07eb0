"""Unmodified agent frameworks in their own venv against the gateway: each sampled
answer is trained once.

docs/frameworks.md has the table.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gateway_cases import ScriptedEngine, gateway_world, in_loop, num_calls
from template_renderers import renderers
from transformers import AutoTokenizer

from asyncrl.messages.records import Outcome
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.token_grammars import TokenGrammars
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "frameworks"
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "HF_HUB_OFFLINE": "1",
    "OTEL_SDK_DISABLED": "true",
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
"""Settings that stop calls to other servers than the gateway."""
PLAY_S = 500.0
SILENT_S = 40.0
"""Seconds that a slow call is silent in the middle of its answer."""
PLACES = {"crewai_agent": "crewai", "openhands_agent": "openhands", "programs": "npm"}
"""Folders of .venv-frameworks for what cannot share a venv, or comes from npm."""


def frameworks_python(name: str) -> Path:
    """Return the Python for a script. Without the frameworks, skip the test, or fail it
    if ASYNCRL_REQUIRE_FRAMEWORKS=1.
    """
    venv = Path(os.environ.get("VENV_FRAMEWORKS", ROOT / ".venv-frameworks"))
    if not venv.exists():
        end = (
            pytest.fail
            if os.environ.get("ASYNCRL_REQUIRE_FRAMEWORKS") == "1"
            else pytest.skip
        )
        end(f"no frameworks at {venv}: run `make setup-frameworks`")
    place = venv / PLACES.get(name, "")
    if not place.exists():
        pytest.skip(
            f"no {place}: install npm and Python 3.12, and run `make setup-frameworks`"
        )
    own = place / "bin" / "python"
    return own if own.exists() else venv / "bin" / "python"


class Framework:
    """A script of tests/frameworks, imported once; each scenario runs in a fork."""

    def __init__(self, name: str, home: Path) -> None:
        self.reader = ThreadPoolExecutor(1)  # the gateway needs the threads of the loop
        kept = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            **OFFLINE,
        }
        command = [
            frameworks_python(name),
            "-P",
            "-W",
            "ignore",
            SCRIPTS / "play.py",
            SCRIPTS / f"{name}.py",
        ]
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=kept,
            cwd=home,
        )

    async def play(self, scenario: str, url: str, key: str) -> Any:
        """Return the result of the scenario. Fails with the framework's traceback."""
        env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(
            json.dumps({"scenario": scenario, "env": env}),
            file=self.process.stdin,
            flush=True,
        )
        try:
            loop = asyncio.get_running_loop()
            reading = loop.run_in_executor(self.reader, self.process.stdout.readline)
            line = await asyncio.wait_for(reading, PLAY_S)
        except TimeoutError:
            self.process.kill()
            pytest.fail(f"{scenario} has not ended after {PLAY_S:.0f} s")
        said = json.loads(
            line
            or '{"error": "the framework could not be imported; see standard error"}'
        )
        assert "error" not in said, said["error"]
        return said["result"]

    def close(self) -> None:
        self.process.kill()  # to take its modules down takes seconds
        self.process.communicate()


def played(
    tokenizer: HFChatTokenizer, says: Sequence[str], is_slow: bool
) -> ScriptedEngine:
    """Return an engine that samples `says` in order, each as the continuation of a
    prefilled answer. A slow engine is silent in the middle of its first answer.
    """
    gate = asyncio.Event()

    def answer(request: SamplingRequest) -> str:
        text = says[len(engine.requests) - 1]
        begun = tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        begun = begun.rpartition("<|im_start|>assistant\n")[2].removeprefix(
            "<think>\n\n</think>\n\n"
        )
        assert text.startswith(begun), (
            f"the gateway began {begun!r}, and the model wants to say {text!r}"
        )
        if len(engine.requests) == 1:
            asyncio.get_running_loop().call_later(SILENT_S if is_slow else 0, gate.set)
        return text.removeprefix(begun)

    engine = ScriptedEngine(
        answer, gate, tokenizer=tokenizer, end=tokenizer.encode(END)[0]
    )
    return engine


# ---- scenarios


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD_TWICE = call("add", a=1, b=2) + "\n" + call("add", a=3, b=4)
SUMS = (ADD_TWICE, call("add", a=3, b=7), "They are 10.")
ADDED = ["They are 10.", 3]
PARIS = {"name": "Paris", "people": 2}
CODE = (
    "Thought: add them.\n<code>\nx = add(1, 2)\ny = add(3, 4)\nprint(x, y)\n</code>",
    "Thought: and their sum.\n<code>\nfinal_answer(add(3, 7))\n</code>",
)


def shell(
    tool: str, argument: str, *last: str, other: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return answers that read two files at once, make `other` calls at once, and then
    join the files.
    """
    read = [call(tool, **{argument: f"cat {name}.txt"}) for name in "ab"]
    calls = ["\n".join(each) for each in (read, other) if each]
    return *calls, call(tool, **{argument: "cat a.txt b.txt > c.txt"}), *last


SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
JOINED = ["Joined.", "alpha\nbeta\n"]
LOADED = (
    call("ToolSearch", query="select:WebFetch,NotebookEdit"),
    call("Read", file_path="x.png"),
)
"""Tools that Claude Code adds later, and an image."""
VIEWED = (
    call("multi_agent_v1__close_agent", target="x"),
    call("view_image", path="x.png"),
)
"""A tool in a namespace of Codex, and an image."""
COUNT = "seq 2000"
IDEA = call("think", thought="Add them.")
LONG_IDEA = call("think", thought="Add " * 1000)
LOOKUP = (call("directory", name="b"), "4")


@dataclass(frozen=True)
class Case:
    """A scenario of a script, the answers of the model, and the expected result.
    `num_branches` above 1: the framework rewrites answers. `is_typed`: a grammar
    constrains the answer.
    """

    framework: str
    scenario: str
    says: tuple[str, ...] = SUMS
    result: Any = None
    num_branches: int = 1
    num_refused: int = 0
    max_prompt_tokens: int = 60_000
    thoughts: str | None = None
    is_typed: bool = False

    def __str__(self) -> str:
        return "-".join(filter(None, [self.framework, self.scenario, self.thoughts]))

    def thinking(self, thoughts: str) -> Case:
        says = tuple(
            f"<think>\nI should do it.\n</think>\n\n{text}" for text in self.says
        )
        # smolagents adds a line to answers, and Qwen3's template omits the thought
        # before it
        num_branches = 2 if self.framework == "smolagents_agents" else self.num_branches
        return replace(self, says=says, thoughts=thoughts, num_branches=num_branches)


CONVERSATIONS = [
    Case("litellm_chat", "tools"),
    Case("openai_agents", "tools"),
    Case("openai_agents", "chat_tools"),
    Case("langchain_agent", "tools"),
    Case("langchain_agent", "streamed_tools"),
    Case("langchain_agent", "responses_tools"),
    Case("pydantic_ai_agent", "tools"),
    Case("pydantic_ai_agent", "responses_tools"),
    Case("pydantic_ai_agent", "anthropic_tools"),
    Case("inspect_ai_eval", "tools"),
    # it tries the model out: "Please say 'hello, world'"
    Case("inspect_ai_eval", "responses_tools", ("hello, world", *SUMS), num_branches=2),
    Case("inspect_ai_eval", "anthropic_tools"),
    Case("smolagents_agents", "code", CODE, ["10", 3]),
    Case("smolagents_agents", "litellm_code", CODE, ["10", 3]),
    Case(
        "mini_swe_agent",
        "tools",
        shell("bash", "command", SUBMIT),
        ["Submitted", JOINED[1]],
    ),
    Case("crewai_agent", "tools"),
    Case("openhands_agent", "think", (f"{IDEA}\n{IDEA}", IDEA, "Done."), ["Done.", 3]),
    Case(
        "programs", "claude", shell("Bash", "command", "Joined.", other=LOADED), JOINED
    ),
    Case(
        "programs",
        "codex",
        shell("exec_command", "cmd", "Joined.", other=VIEWED),
        JOINED,
    ),
    Case("programs", "ai_chat"),
    Case("programs", "ai_messages"),
    Case("example_agents", "openai_agents", LOOKUP, ["", 1.0]),
    Case("example_agents", "langgraph", LOOKUP, ["", 1.0]),
]
SLOW = (
    "litellm_chat-tools",
    "openai_agents-tools",
    "langchain_agent-streamed_tools",
    "mini_swe_agent-tools",
)
SLOW += (
    "crewai_agent-tools",
    "openhands_agent-think",
    "programs-claude",
    "programs-codex",
    "programs-ai_chat",
)

TOO_LONG = ["ContextWindowExceededError"]
COMPACTED = (
    call("Bash", command="seq 4000"),
    call("Bash", command="cat a.txt"),
    "<summary>Join them.</summary>",
)
COMPACTED += (call("Bash", command="cat a.txt b.txt > c.txt"), "Joined.")
OVERFLOWS = [
    Case("litellm_chat", "overflow", (ADD_TWICE,), TOO_LONG, 1, 1, 9000),
    Case("litellm_chat", "anthropic_overflow", (ADD_TWICE,), TOO_LONG, 1, 1, 9000),
    Case(
        "mini_swe_agent",
        "overflow",
        (call("bash", command=COUNT),),
        TOO_LONG,
        1,
        1,
        9000,
    ),
    Case(
        "langchain_agent",
        "overflow",
        (ADD_TWICE,),
        ["ContextOverflowError"],
        1,
        1,
        9000,
    ),
    Case(
        "crewai_agent",
        "overflow",
        (ADD_TWICE,),
        ["LLMContextLengthExceededError"],
        1,
        2,
        9000,
    ),
    Case(
        "openhands_agent",
        "think",
        (LONG_IDEA, "A summary.", "Done."),
        ["Done.", 1],
        3,
        1,
        18_000,
    ),
    Case(
        "programs",
        "claude",
        (call("Bash", command=COUNT),),
        ["Prompt is too long", None],
        1,
        5,
        47_000,
    ),
    Case("programs", "claude_compact", COMPACTED, JOINED, 3, 0, 80_000),
    Case(
        "programs",
        "codex",
        (call("exec_command", cmd=COUNT),),
        ["context window", None],
        1,
        1,
        38_000,
    ),
    Case(
        "programs",
        "ai_overflow",
        (ADD_TWICE,),
        ["400 context_length_exceeded", 2],
        1,
        1,
        9000,
    ),
]
"""Clients whose second call is too long. They summarize the conversation, or end with a
clear error.
"""

THOUGHTS = [
    case.thinking("reasoning_content")
    for case in CONVERSATIONS
    if "streamed" not in case.scenario
]
ALONE = [Case("openai_agents", "one_call_at_a_time", result=["They are 10.", 2])]

END = "<|im_end|>"
TYPED = {
    "litellm_chat": ["parse"],
    "openai_agents": ["output_type", "chat_output_type"],
    "langchain_agent": ["json_schema", "function_calling", "json_mode"],
    "pydantic_ai_agent": ["tool_output", "native_output", "prompted_output"],
    "inspect_ai_eval": ["response_schema"],
}
CALLED = {"function_calling": "City", "tool_output": "final_result"}
STRUCTURED = [
    Case(
        name,
        scenario,
        (call(CALLED[scenario], **PARIS) if scenario in CALLED else json.dumps(PARIS),),
        PARIS,
        is_typed=True,
    )
    for name, scenarios in TYPED.items()
    for scenario in scenarios
]


@pytest.fixture(scope="module")
def framework(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Framework]]:
    """Return a function that starts frameworks by script name, once each; again for
    another `copy`.
    """
    home = tmp_path_factory.mktemp("home")
    running: dict[tuple[str, int], Framework] = {}

    def start(name: str, copy: int = 0) -> Framework:
        if (name, copy) not in running:
            running[name, copy] = Framework(name, home)
        return running[name, copy]

    yield start
    for each in running.values():
        each.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFChatTokenizer:
    folder = tmp_path_factory.mktemp("qwen3")
    renderers(folder)("qwen3")
    return Recording(folder, chat_template=folder / "qwen3.jinja")


class Recording(HFChatTokenizer):
    """Keeps the texts that the template renders."""

    texts: ClassVar[set[str]] = set()

    def render(self, messages: Any, **more: Any) -> str:
        text = super().render(messages, **more)
        self.texts.add(text)
        return text


async def check(
    case: Case,
    framework: Callable[..., Framework],
    tokenizer: HFChatTokenizer,
    is_slow: bool = False,
) -> None:
    """Play a case. Each sampled token is trained once, and prompts are what the
    template renders.
    """
    model = played(tokenizer, case.says, is_slow)
    most = case.max_prompt_tokens
    config: dict[str, Any] = {
        "max_tokens": 4096,
        "max_prompt_tokens": most,
        "max_length": most + 4096,
    }
    config |= {"thoughts_field": case.thoughts} if case.thoughts else {}
    async with gateway_world(
        model, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, **config
    ) as world:
        result = await framework(case.framework).play(
            case.scenario, world.url, world.session.key
        )
        num_refused = num_calls(world, "refused")
        branches = world.session.rollout(0, Outcome(), 1.0)
    if isinstance(result, list):  # with the thought, if it is part of the text
        result[0] = result[0].rpartition("</think>")[2].strip()
    assert result == (case.result or ADDED)
    assert num_refused == case.num_refused
    sampled = [
        tokenizer.decode(list(each), skip_special_tokens=False)
        for each in model.sampled
    ]
    assert len(sampled) == len(case.says)
    ids = [each.token_ids[each.loss_mask].tolist() for each in branches]
    trained = [tokenizer.decode(each, skip_special_tokens=False) for each in ids]
    assert sorted("".join(trained).split(END)) == sorted("".join(sampled).split(END))
    assert len(branches) == case.num_branches
    for request, text in zip(model.requests, sampled, strict=True):
        if case.is_typed:
            assert request.grammar is not None, "its form was asked for"
            fast = AutoTokenizer.from_pretrained(tokenizer.model_path)
            grammars = TokenGrammars(fast, len(fast))
            # raises if not of it
            grammars.begin(request.grammar, tokenizer.encode(text.removesuffix(END)))
        elif case.thoughts is None:
            prompt = tokenizer.decode(
                list(request.prompt_ids), skip_special_tokens=False
            )
            assert prompt in Recording.texts, "it is not what the template renders"
            assert "unsupported call" not in prompt, "Codex does not know its own tool"


@in_loop
@pytest.mark.rotated
async def test_slow_call_is_not_cut(
    framework: Callable[..., Framework], tokenizer: HFChatTokenizer
) -> None:
    """The first test: during the silence all frameworks are imported, for the other
    tests.
    """
    slow = [case for case in CONVERSATIONS if str(case) in SLOW]
    assert len(slow) == len(SLOW)
    for case in CONVERSATIONS:
        framework(case.framework)
    async with asyncio.TaskGroup() as group:
        for number, case in enumerate(slow):
            # A process plays one scenario at a time, and each is silent.
            before = [one.framework for one in slow[:number]]
            own = partial(framework, copy=before.count(case.framework))
            group.create_task(check(case, own, tokenizer, is_slow=True))


@pytest.mark.parametrize(
    "case", [*CONVERSATIONS, *ALONE, *THOUGHTS, *STRUCTURED, *OVERFLOWS], ids=str
)
@in_loop
async def test_each_answer_is_trained_once(
    case: Case, framework: Callable[..., Framework], tokenizer: HFChatTokenizer
) -> None:
    await check(case, framework, tokenizer)
