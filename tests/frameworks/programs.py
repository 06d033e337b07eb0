"""Programs of npm, as they come: Claude Code, Codex, and agents of the AI SDK.
programs.sh starts them.
"""

import json
import subprocess
import sys
from pathlib import Path

NPM = Path(sys.prefix) / "npm"


def printed(*command):
    """Return the JSON in the last line that a program prints."""
    script = Path(__file__).with_name("programs.sh")
    ended = subprocess.run(
        ["bash", script, NPM, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def claude():
    return printed("claude")


def claude_compact():
    return printed("claude", "80000")


def codex():
    return printed("codex")


def ai_chat():
    return printed("ai_sdk", "chat", "")


def ai_messages():
    return printed("ai_sdk", "messages", "")


def ai_overflow():
    return printed("ai_sdk", "chat", "7" * 5000)
