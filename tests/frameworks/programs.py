"""Programs of npm, as they come: Claude Code, Codex, and agents of the AI SDK."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NPM = Path(sys.prefix) / "npm"
TASK = "Join a.txt and b.txt into c.txt."


def coding_agent(*command):
    """Run a coding agent in a folder with two files; return what it says and the file that it makes."""
    with tempfile.TemporaryDirectory() as home:
        work = Path(home, "work")
        work.mkdir()
        (work / "a.txt").write_text("alpha\n")
        (work / "b.txt").write_text("beta\n")
        env = os.environ | {"HOME": home, "CODEX_HOME": str(work), "IS_SANDBOX": "1"}
        program = NPM / "node_modules" / ".bin" / command[0]
        ended = subprocess.run(
            [program, *command[1:]],
            cwd=work,
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        made = work / "c.txt"
        return ended.stdout, ended.stderr, made.read_text() if made.exists() else None


def claude():
    flags = ["--model", "policy", "--dangerously-skip-permissions", "--output-format", "json"]
    said, _, made = coding_agent("claude", "-p", TASK, *flags)
    return [json.loads(said)["result"], made]


def codex():
    provider = {
        "name": "asyncrl",
        "base_url": os.environ["OPENAI_BASE_URL"],
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    fields = ",".join(f"{key}={json.dumps(value)}" for key, value in provider.items())
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    flags += ["-c", "model=policy", "-c", "model_provider=asyncrl"]
    flags += ["-c", f"model_providers.asyncrl={{{fields}}}"]
    said, log, made = coding_agent("codex", "exec", *flags, TASK)
    is_full = "ran out of room in the model's context window" in log
    return ["context window" if is_full else said.strip(), made]


def ai_sdk(model, is_long=False):
    """Run ai_sdk.mjs. Node finds packages of its folder for a script on standard input."""
    script = Path(__file__).with_name("ai_sdk.mjs").read_text()
    settings = {"MODEL": model, "RESULT": "7" * 5000 if is_long else ""}
    command = ["node", "--input-type=module"]
    ended = subprocess.run(
        command,
        cwd=NPM,
        env=os.environ | settings,
        input=script,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def ai_chat():
    return ai_sdk("chat")


def ai_messages():
    return ai_sdk("messages")


def ai_overflow():
    return ai_sdk("chat", is_long=True)
