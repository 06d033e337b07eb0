"""Whether bubblewrap works here: in a container it may be there and not be allowed to make namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

TRIAL = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]


def need_bubblewrap() -> None:
    """Skip the test where it does not work; fail it with ASYNCRL_REQUIRE_SANDBOX=1."""
    has_it = shutil.which("bwrap") is not None
    if has_it and subprocess.run(TRIAL, capture_output=True).returncode == 0:
        return
    why = "bwrap may not make namespaces here" if has_it else "no bwrap: apt-get install bubblewrap"
    if os.environ.get("ASYNCRL_REQUIRE_SANDBOX") == "1":
        pytest.fail(f"ASYNCRL_REQUIRE_SANDBOX=1, but {why}")
    pytest.skip(why)
