"""The benchmark of the gateway: its conversations and its connections."""

import asyncio
import contextlib
import json

import pytest
from gateway_load import TURNS, Chat, Load, Wire, request_bytes


def test_a_conversation_sends_all_that_came_before_and_is_the_same_for_the_same_number():
    def asks(chat: Chat) -> list[dict]:
        return json.loads(chat.request().partition(b"\r\n\r\n")[2])["messages"]

    chat = Chat("key", "model", 7)
    first = asks(chat)
    chat.take(json.dumps({"choices": [{"message": {"content": "Hm."}}]}).encode())
    system, user, answer, next_user = asks(chat)
    assert [system, user] == first == asks(Chat("key", "model", 7))
    assert (answer["role"], answer["content"], next_user["role"]) == ("assistant", "Hm.", "user")


class Echo:
    """A server that answers each request with its body, in two pieces, and counts its connections; a Target
    for a Load.
    """

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.num_connections, self.num_talks, self.asked = 0, 0, 0
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
                writer.write(f"HTTP/1.1 200 X\r\ncontent-length: {len(body)}\r\n".encode())
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


def test_a_load_keeps_its_connections_measures_the_calls_of_its_window_and_leaves_none_under_way():
    async def story() -> None:
        async with Echo() as echo:

            async def more(num_calls: int) -> None:
                end = echo.asked + num_calls  # a busy machine may notice the end of the warm-up late
                while echo.asked < end:  # noqa: ASYNC110  a socket gives no other sign
                    await asyncio.sleep(0.001)

            measured = await Load(echo, sessions=3).run(more(30), more(60), lambda: echo.asked / 1000)
            num_asked = measured.cpu_s * 1000  # of the window, by the server's own count
            assert num_asked > 50
            in_flight = 2 * 3  # at either end
            assert len(measured.latencies) == pytest.approx(num_asked, abs=in_flight)
            assert echo.num_connections == 3
            assert echo.num_talks > 30 / TURNS

    asyncio.run(story())
