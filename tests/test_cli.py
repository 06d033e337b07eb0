"""The command line as a person meets it: real processes, real exit codes, and no torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_TORCH = """
import sys
sys.modules["torch"] = None
from asyncrl.cli import main
sys.argv[0] = "asyncrl"
main()
"""


LINES = """
--help -> 0: simulate ... serve
--version -> 0: asyncrl 0.
run --help -> 0: --resume
work --help -> 0: ASYNCRL_WORKER_KEY
keys buffer -> 0: buffer.max_staleness (integer, default 1)
keys bufer -> 2: did you mean buffer?
keys buffer.max_staleness -> 0: buffer.max_staleness (integer, default 1)
keys straggler -> 0: buffer.on_overdue (wait | mask | drop
keys trainer.lr -> 2: did you mean trainer.learning_rate?
keys buffer.max_stalenes -> 2: did you mean buffer.max_staleness?
keys --schema -> 0: "max_staleness": {
-h -> 0: simulate ... --install-completion
run -h -> 0: --resume
check configs/quickstart.yaml model.dtype=auto -> 0: dtype: auto is ... engine-0 ... mode: ... memory of cpu:
run configs/quickstart.yaml buffer.max_stalenes=4 -> 2: did you mean buffer.max_staleness? ... Way out:
run configs/quickstart.yaml --trainer.num_steps 3 -> 2: write trainer.num_steps=3.
run configs/quickstart.yaml --trainer.num_steps=3 -> 2: write trainer.num_steps=3.
check configs/quickstart.yaml observe.trackers=[no_such:Mine] -> 2: there is no module no_such ... Way out:
simulate configs/quickstart.yaml --devices 1 -> 2: --devices
status docs -> 2: Way out:
inspect docs -> 2: Way out:
report docs -> 2: is no run directory ... Way out:
scale docs engines=2 -> 2: is no run directory ... Way out:
export docs out -> 2: is no run directory ... Way out:
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_a_command_says_and_returns_what_it_should_where_torch_cannot_be_imported(line: str) -> None:
    arguments, code, says = re.split(r" -> |(?<=\d): ", line)
    command = [sys.executable, "-c", NO_TORCH, *arguments.split()]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == int(code), answer.stderr
    said = answer.stderr if answer.returncode else answer.stdout
    assert all(words in said for words in says.split(" ... ")), said
    assert "Traceback" not in answer.stderr


BASH = """
eval "$(_ASYNCRL_COMPLETE=source_bash asyncrl)"
for line in "asyncrl wa" "asyncrl run --re" "asyncrl run c.yaml buffer.max_st" "asyncrl keys trainer.lear"; do
    COMP_WORDS=($line); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=(); COMP_LINE="$line"
    $(complete -p asyncrl | sed 's/.*-F *//; s/ .*//') asyncrl "${COMP_WORDS[-1]}" ""
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_commands_options_and_keys_of_settings(tmp_path: Path) -> None:
    command = tmp_path / "asyncrl"
    command.write_text(f"#!{sys.executable}\nfrom asyncrl.cli import app\napp(prog_name='asyncrl')\n")
    command.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", BASH], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    said = done.stdout.splitlines()
    assert said == ["watch", "--resume", "buffer.max_staleness=", "trainer.learning_rate"], done.stderr
