"""The benchmark of the gateway: its arithmetic, its conversations, and its connections."""

import asyncio
import contextlib
import json

import gateway
import pytest
from gateway import Added
from gateway_load import TURNS, Chat, Load, Measured, Wire, request_bytes


def test_growth_is_the_slope_of_memory_over_ended_sessions():
    steady, growing = (
        [(ended, 5000) for ended in (0, 700, 900)],
        [(ended, 5000 + 3 * ended) for ended in (0, 700, 900)],
    )
    assert gateway.growth_per_thousand(steady) == 0
    assert gateway.growth_per_thousand(growing) == pytest.approx(3000)


def test_added_latency_is_the_difference_of_the_same_percentile():
    direct, through = (
        Measured(1.0, latencies=[1.0] * 98 + [2.0] * 2),
        Measured(1.0, latencies=[1.5] * 98 + [5.0] * 2),
    )
    assert (Added(direct, through).added_s(50), Added(direct, through).added_s(99)) == (0.5, 3.0)


def body_of(request: bytes) -> dict:
    return json.loads(request.partition(b"\r\n\r\n")[2])


def test_a_conversation_sends_all_that_came_before_and_is_the_same_for_the_same_number():
    chat, again = Chat("key", "model", 7), Chat("key", "model", 7)
    first = body_of(chat.request())["messages"]
    chat.take(json.dumps({"choices": [{"message": {"content": "Hm."}}]}).encode())
    second = body_of(chat.request())["messages"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first == body_of(again.request())["messages"]
    assert second[2]["content"] == "Hm."


class Echo:
    """A server that answers each request with its body, in two pieces, and counts its connections; a Target
    for a Load.
    """

    host = "127.0.0.1"

    def __init__(self, *, status: int = 200) -> None:
        self.status, self.num_connections, self.num_talks, self.asked = status, 0, 0, 0
        self.serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.serving.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            while head := await reader.readline():
                while line := (await reader.readline()).strip():
                    head = line if line.startswith(b"Content-Length") else head
                body = await reader.readexactly(int(head.partition(b":")[2]))
                self.asked += 1
                writer.write(f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(body)}\r\n".encode())
                await writer.drain()
                writer.write(b"\r\n" + body)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def next_talk(self, talk: object | None, wire: Wire) -> "Echo":
        self.num_talks += 1
        return self

    def request(self) -> bytes:
        return request_bytes("/", "key", b"hello")

    def take(self, answer: bytes) -> None:
        assert answer == b"hello"

    async def __aenter__(self) -> "Echo":
        self.server = await asyncio.start_server(self.serve, self.host, 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await asyncio.gather(*self.serving)


def test_a_wire_keeps_its_connection_and_reads_answers_that_come_in_pieces():
    async def story() -> None:
        async with Echo() as echo:
            wire = Wire(echo.host, echo.port)
            assert [(await wire.post(request_bytes("/", "key", body)))[0] for body in (b"one", b"two")] == [
                b"one",
                b"two",
            ]
            assert echo.num_connections == 1
            wire.close()

    asyncio.run(story())


def test_a_load_measures_the_calls_of_its_window_and_leaves_none_under_way():
    async def story() -> None:
        async with Echo() as echo:

            async def more(num_calls: int) -> None:
                end = (
                    echo.asked + num_calls
                )  # from when it is waited for: a busy machine may notice the end of the warm-up late
                while echo.asked < end:  # noqa: ASYNC110  a socket gives no other sign
                    await asyncio.sleep(0.001)

            measured = await Load(echo, sessions=3).run(more(30), more(60), lambda: echo.asked / 1000)
            num_asked = measured.cpu_s * 1000  # of the window, by the server's own count
            assert num_asked > 50
            assert len(measured.latencies) == pytest.approx(num_asked, abs=2 * 3), (
                "but for those in flight at either end"
            )
            assert echo.num_connections == 3
            assert echo.num_talks > 30 / TURNS

    asyncio.run(story())
