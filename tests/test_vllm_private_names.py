"""Each private name of vLLM that asyncrl uses has the signature that it was written for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from vllm_process import vllm_python

EXPECTED = Path(__file__).with_name("vllm_private_names.txt")
"""MODULE:NAME(PARAMETERS or type), of vLLM 0.32."""


@pytest.mark.slow
@pytest.mark.vllm
def test_private_names_have_the_known_signatures() -> None:
    command = [str(vllm_python()), str(EXPECTED.with_suffix(".py"))]
    expected = EXPECTED.read_text()
    done = subprocess.run(command, input=expected, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-len(expected.splitlines()) :] == expected.splitlines()
