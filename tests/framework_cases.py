"""Agent frameworks in their own venv (make setup-frameworks), and a scripted model with Qwen3's template."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.messages.records import Completion, SamplingRequest, VersionSpan
from asyncrl.rollouts.tokenizer import HFChatTokenizer

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "frameworks"
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Settings that stop calls to other servers than the gateway."""
PLAY_S = 240.0
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def frameworks_python() -> Path:
    """Return the Python with the frameworks. Without one, skip the test, or fail it if
    ASYNCRL_REQUIRE_FRAMEWORKS=1.
    """
    python = ROOT / ".venv-frameworks" / "bin" / "python"
    if not python.exists():
        if os.environ.get("ASYNCRL_REQUIRE_FRAMEWORKS") == "1":
            pytest.fail(
                f"ASYNCRL_REQUIRE_FRAMEWORKS=1, but there is no {python}: run `make setup-frameworks`"
            )
        pytest.skip(f"no frameworks at {python}: run `make setup-frameworks`")
    return python


class Framework:
    """One script of tests/frameworks, imported once; each scenario runs in a fork."""

    def __init__(self, name: str, home: Path) -> None:
        kept = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), **OFFLINE}
        command = [frameworks_python(), "-P", "-W", "ignore", SCRIPTS / "play.py", SCRIPTS / f"{name}.py"]
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
        print(json.dumps({"scenario": scenario, "env": env}), file=self.process.stdin, flush=True)
        try:
            line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), PLAY_S)
        except TimeoutError:
            self.process.kill()
            pytest.fail(f"{scenario} has not ended after {PLAY_S:.0f} s")
        said = json.loads(line or '{"error": "the framework could not be imported; see standard error"}')
        assert "error" not in said, said["error"]
        return said["result"]

    def close(self) -> None:
        self.process.communicate()


@contextmanager
def playing(home: Path) -> Iterator[Callable[[str], Framework]]:
    """Return a function that starts frameworks by script name, once each."""
    running: dict[str, Framework] = {}

    def find(name: str) -> Framework:
        if name not in running:
            running[name] = Framework(name, home)
        return running[name]

    try:
        yield find
    finally:
        for framework in running.values():
            framework.close()


def qwen3_tokenizer(folder: Path) -> HFChatTokenizer:
    """Save and load Qwen3's chat template with a byte tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=259, initial_alphabet=alphabet, special_tokens=SPECIAL)
    tokenizer.train_from_iterator([], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    template = resources.files("trl") / "chat_templates" / "qwen3.jinja"
    fast.chat_template = template.read_text(encoding="utf-8")
    fast.save_pretrained(folder)
    return HFChatTokenizer(folder)


@dataclass(eq=False)
class PlayedModel:
    """Replacement of an EnginePool that samples the answers of `says` in order, with a weight push in the
    middle of each. It continues a prefilled answer and stops at stop texts.
    """

    tokenizer: HFChatTokenizer
    says: Sequence[str]
    requests: list[SamplingRequest] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    """Sampled texts, end of turn included."""

    async def generate(
        self, request: SamplingRequest, *, on_tokens: Callable[[Sequence[int]], None] | None = None, **_: Any
    ) -> Completion:
        assert len(self.requests) < len(self.says), (
            f"call {len(self.requests)}: it has said all it has to say"
        )
        text = self.says[len(self.requests)] + "<|im_end|>"
        self.requests.append(request)
        begun = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        begun = begun.rpartition("<|im_start|>assistant\n")[2].removeprefix("<think>\n\n</think>\n\n")
        assert text.startswith(begun), f"the gateway began {begun!r}, and the model wants to say {text!r}"
        text = text.removeprefix(begun)
        ends = [text.index(stop) + len(stop) for stop in request.stop if stop in text]
        ids = self.tokenizer.encode(text[: min(ends)] if ends else text)[: request.max_tokens]
        self.sampled.append(self.tokenizer.decode(list(ids), skip_special_tokens=False))
        for start in range(0, len(ids), 16):
            await asyncio.sleep(0)
            if on_tokens is not None:
                on_tokens(ids[start : start + 16])
        half = len(ids) // 2
        cuts = ((0, half, 4), (half, len(ids), 5))
        spans = tuple(VersionSpan(*cut) for cut in cuts if cut[0] < cut[1])
        reason = "stop" if len(ids) < request.max_tokens else "length"
        return Completion(tuple(ids), (-0.5,) * len(ids), spans, reason, 1)  # type: ignore[arg-type]
