"""What a call of a long agent costs the gateway: 64 agents of 250 turns with 8 tools.

    python benchmarks/agents.py [--agents 64] [--turns 250] [--template qwen2_5] [--write]

Two processes on a core each: the load, and the gateway as a run has it over an engine that answers every
prompt with a tool call at once. An agent sends its whole history with each call, as OpenAI's client writes
it: system prompt, task, and for each turn the call that was sampled and 400 characters of the tool's result.
The agents take their turns together; a turn that is measured is so over all of them, with the two before it.

loop ms       Processor time of the event loop's thread, a call.
process ms    The same of all threads: what is long is read and rendered in one beside the loop.
anew ms       Of all threads, for calls whose bodies differ before the history (8 agents, one call each), so
              that all of it is read, checked and rendered again.
prefilled     Tokens that an engine has to prefill if it keeps the last prompt and answer of a session, for
              each that is new in its prompt: 1.00 is none twice. Of a tenth of all turns so far.

Target: loop <= 3 ms at turn 249. Last line: `ratio: X` = 3 ms over the loop's at the last turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from gateway_load import Wire, request_bytes
from pydantic_core import from_json, to_json
from report import options, reported

from asyncrl.placement.processes import ChildProcess, bind_socket

HERE = Path(__file__).parent
TARGET_MS, WINDOW, NUM_ANEW = 3.0, 3, 8
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = "the file holds a list of names and a test that fails when one of them is missing from it".split()


def tools() -> list[dict[str, Any]]:
    """Eight of them, of two parameters each."""
    made = []
    for number in range(8):
        told = {"type": "string", "description": f"Path of the file that tool {number} is to look at."}
        asked = {"type": "integer", "description": "How many lines of it, counted from the first."}
        parameters = {"type": "object", "properties": {"path": told, "lines": asked}, "required": ["path"]}
        about = f"Look at a file in the way of tool {number}, and say what it holds."
        function = {"name": f"tool_{number}", "description": about, "parameters": parameters}
        made.append({"type": "function", "function": function})
    return made


class Agent:
    """One conversation, kept as the bytes of its messages."""

    def __init__(self, key: str, number: int, port: int) -> None:
        self._key, self._number, self.wire = key, number, Wire("127.0.0.1", port)
        task = [
            {"role": "system", "content": "You work on a repository with the tools that you are given."},
            {"role": "user", "content": f"Find out why test number {number} fails, and say how to mend it."},
        ]
        self._messages = [to_json(message) for message in task]
        self._rest = b'],"model":"policy","tools":' + to_json(tools()) + b"}"
        self.num_prompt = 0

    async def turn(self) -> None:
        """Ask, and run the tool."""
        answer = from_json((await self.wire.post(self._request(b"")))[0])
        message = answer["choices"][0]["message"]
        self.num_prompt = answer["usage"]["prompt_tokens"]
        (call,) = message["tool_calls"]
        at = len(self._messages) + self._number
        text = " ".join(WORDS[(at + index * index) % len(WORDS)] for index in range(90))[:400]
        result = {"role": "tool", "tool_call_id": call["id"], "content": text}
        self._messages += [to_json(message), to_json(result)]

    async def ask_anew(self, number: int) -> None:
        """The same once more, in bytes that no call before had."""
        await self.wire.post(self._request(b'"user":"%d",' % number))

    def _request(self, first: bytes) -> bytes:
        body = b"{" + first + b'"messages":[' + b",".join(self._messages) + self._rest
        return request_bytes("/v1/chat/completions", self._key, body)


async def ask(wire: Wire, path: str, body: Any) -> Any:
    """One of the gateway's routes for this benchmark."""
    return from_json((await wire.post(request_bytes(path, "none", to_json(body))))[0])


async def measure(port: int, arguments: argparse.Namespace) -> float:
    """Play all turns; the loop's milliseconds a call at the last."""
    wire, last = Wire("127.0.0.1", port), arguments.turns - 1
    keys = await ask(wire, "/bench/open", {"open": arguments.agents})
    agents = [Agent(key, number, port) for number, key in enumerate(keys)]
    shown = sorted({turn for turn in (1, 10, 50, last) if turn <= last})
    print(f"{'turn':>5}{'tokens':>9}{'loop ms':>10}{'process ms':>12}{'anew ms':>10}{'prefilled':>11}")
    loop_ms, before = 0.0, {}
    for turn in range(arguments.turns):
        if any(turn == max(0, at - WINDOW + 1) for at in shown):
            before = await ask(wire, "/bench/stats", {}) | {"turn": turn}
        await asyncio.gather(*[agent.turn() for agent in agents])
        if turn not in shown:
            continue
        after = await ask(wire, "/bench/stats", {})
        num_calls = (turn + 1 - before["turn"]) * len(agents)
        loop_ms, process_ms = (
            1e3 * (after[each] - before[each]) / num_calls for each in ("loop_s", "process_s")
        )
        some = agents[:NUM_ANEW]
        await asyncio.gather(*[agent.ask_anew(turn) for agent in some])
        anew = await ask(wire, "/bench/stats", {})
        anew_ms = 1e3 * (anew["process_s"] - after["process_s"]) / len(some)
        prefilled = f"{after['prefilled'] / after['new']:.2f}" if after["new"] else "-"
        print(
            f"{turn:>5}{agents[0].num_prompt:>9}{loop_ms:>10.2f}{process_ms:>12.2f}{anew_ms:>10.2f}{prefilled:>11}",
            flush=True,
        )
        before = anew | {"turn": turn + 1}
    stats = await ask(wire, "/bench/stats", {})
    names = ("calls", "extended", "realigned", "edited", "uncut")
    print("calls: " + ", ".join(f"{stats[name]} {name}" for name in names))
    if stats["edited"] or stats["uncut"] or stats["refused"]:
        raise SystemExit(f"calls did not go on from what was recorded, or were refused: {stats}")
    for each in (wire, *(agent.wire for agent in agents)):
        each.close()
    return loop_ms


def make_tokenizer(folder: Path, template: str) -> None:
    """A byte-level BPE of this repository's pages, with a chat template that trl ships, or of a file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    pages = [page.read_text(encoding="utf-8") for page in sorted(HERE.parent.glob("docs/*.md"))]
    tokenizer.train_from_iterator(pages, trainer)
    file = Path(template)
    if not file.is_file():
        file = Path(str(resources.files("trl"))) / "chat_templates" / f"{template}.jinja"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token=SPECIAL[0])
    fast.chat_template = file.read_text(encoding="utf-8")
    fast.save_pretrained(folder)
    (folder / "config.json").write_text("{}", encoding="utf-8")


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Start the gateway, measure, and print the ratio."""
    from gateway_sides import wait_open

    cores = sorted(os.sched_getaffinity(0))
    model = folder / "model"
    make_tokenizer(model, arguments.template)
    with bind_socket("the gateway", None) as listener:
        port = listener.getsockname()[1]
    spec = json.dumps({"core": cores[0], "model": str(model), "port": port})
    os.sched_setaffinity(0, {cores[-1]})
    env = {"PYTHONPATH": str(HERE)}
    child = ChildProcess("gateway", "agents_ours", spec, run_dir=folder, secret="", env=env)
    await child.start()
    try:
        await wait_open(child, port)
        print(f"{arguments.agents} agents, 8 tools, chat template {arguments.template}")
        loop_ms = await measure(port, arguments)
    finally:
        await child.aclose()
    print(f"ratio: {TARGET_MS / loop_ms:.2f}")


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=250)
    parser.add_argument("--template", default="qwen2_5", help="one that trl ships, or a Jinja file")
    arguments = parser.parse_args()
    with (
        reported("agents", is_kept=arguments.write),
        tempfile.TemporaryDirectory(prefix="asyncrl-agents-") as folder,
    ):
        asyncio.run(run(arguments, Path(folder)))


if __name__ == "__main__":
    main()
