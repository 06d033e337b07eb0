"""The gateway and vLLM's server give the same requests the same status, or a page says
why not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from compared_requests import GROUPS, status_of, wrong_statuses
from engine_in_process import make_qwen3
from gateway_cases import gateway_world, in_loop
from vllm_house import LETTERS
from vllm_process import vllm_python

from asyncrl.launch.processes import group_members
from asyncrl.trainer.model.random_init import make_character_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
KEY = "key"


@in_loop
async def test_gateway_gives_each_request_the_status_of_the_table() -> None:
    async with gateway_world(on_sampling_override="honour") as world:
        host, _, port = world.url.removeprefix("http://").partition(":")
        connect = partial(asyncio.open_connection, host, int(port))
        assert not await wrong_statuses(connect, "ours", lambda: world.open().key)


def test_page_says_where_the_gateway_differs_from_vllm() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for group in GROUPS:
        if "ours" in group:
            row = f"| {group['why']} | {group['vllm']} | {group['ours']} |"
            assert row in page, f"docs/gateway.md lacks\n{row}"


@contextmanager
def vllm_server(folder: Path) -> Iterator[Path]:
    """Run `vllm serve` on a tiny model; yield its socket, which may not exist yet."""
    tokenizer = make_character_tokenizer(LETTERS, has_tool_role=True)
    model = make_qwen3(folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    address = folder / "server.sock"
    arguments = f"--uds {address} --served-model-name policy --api-key {KEY} --dtype float32 --enforce-eager"
    arguments += " --max-model-len 2400 --max-num-seqs 8 --enable-auto-tool-choice --tool-call-parser hermes"
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    own |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [str(vllm_python().parent / "vllm"), "serve", str(model)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments.split()],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environ | own,
            start_new_session=True,
        )
    try:
        yield address
    finally:
        process.terminate()
        process.wait(60)
        psutil.wait_procs(group_members(process.pid), timeout=60)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_gives_each_request_the_status_of_the_table(tmp_path: Path) -> None:
    async def compare(address: Path) -> list[tuple[str, int]]:
        connect = partial(asyncio.open_unix_connection, address)
        async with asyncio.timeout(400):
            while True:
                with contextlib.suppress(OSError):
                    health = b"GET /health HTTP/1.0\r\n\r\n"
                    assert await status_of(connect, health) == 200
                    return await wrong_statuses(connect, "vllm", lambda: KEY)
                await asyncio.sleep(0.1)

    with vllm_server(tmp_path) as address:
        assert not asyncio.run(compare(address))
