"""The benchmarks' own HTTP client, against servers that cut their answers everywhere."""

import asyncio

import pytest
from phloem.benchmarks.light_http import LightClient, Reply, without_chunks

EVENTS = [b'data: {"a": 1}\n\n', b"data: " + b"x" * 300 + b"\n\n", b"data: [DONE]\n\n"]
CHUNKED = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def _asked(answers: list[list[bytes]], *, closes: bool, keep_alive: bool = True) -> tuple[list[Reply], int]:
    """The replies to as many requests as there are answers, each sent in these pieces; how many connections it took."""
    left, connections = list(answers), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while left:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\n") and (b"connection: close" in head) != keep_alive
            assert await reader.readexactly(2) == b"{}"
            for piece in left.pop(0):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if closes:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = LightClient(f"http://127.0.0.1:{port}/base/", keep_alive=keep_alive)
    try:
        return [await client.post("/v1/x", b"{}") for _ in answers], connections
    finally:
        await client.aclose()
        server.close()


@pytest.mark.parametrize("step", [1, 2, 7, 64, 10_000])
def test_chunked_answers_are_read_however_they_are_cut(step: int) -> None:
    whole = HEAD + CHUNKED
    pieces = [whole[i : i + step] for i in range(0, len(whole), step)]
    replies, connections = asyncio.run(_asked([pieces, pieces], closes=False))
    assert [reply.body for reply in replies] == [b"".join(EVENTS)] * 2 and connections == 1
    assert all(reply.status == 200 and all(seconds > 0 for seconds, _ in reply.pieces) for reply in replies)


def test_each_event_keeps_its_own_time() -> None:
    pieces = [(float(i), b"%x\r\n%s\r\n" % (len(event), event)) for i, event in enumerate(EVENTS)]
    assert list(without_chunks([*pieces, (9.0, b"0\r\n\r\n")])) == [
        *zip((0.0, 1.0, 2.0), EVENTS, strict=True),
        (9.0, b""),
    ]


@pytest.mark.parametrize(
    ("answer", "closes", "keep_alive"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nlost", False, True),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nlost", False, False),
        (b"HTTP/1.1 404 Not Found\r\n\r\nlost", True, True),
    ],
)
def test_whole_answers_end_by_their_length_or_with_the_connection(
    answer: bytes, closes: bool, keep_alive: bool
) -> None:
    replies, connections = asyncio.run(_asked([[answer]] * 2, closes=closes, keep_alive=keep_alive))
    assert [(reply.status, reply.body) for reply in replies] == [(404, b"lost")] * 2
    assert connections == (1 if keep_alive and not closes else 2)


@pytest.mark.parametrize("cut", [5, len(HEAD) + 20, len(HEAD + CHUNKED) - 3])
def test_an_answer_that_breaks_off_is_an_error(cut: int) -> None:
    with pytest.raises(ConnectionResetError, match="before its answer had ended"):
        asyncio.run(_asked([[(HEAD + CHUNKED)[:cut]]], closes=True))


def test_after_an_answer_that_broke_off_the_connection_is_not_used_again() -> None:
    async def asked() -> list[object]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writer.write(HEAD)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = LightClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        found = await asyncio.gather(client.post("/", b"{}"), client.post("/", b"{}"), return_exceptions=True)
        found.append(await asyncio.gather(client.post("/", b"{}"), return_exceptions=True))
        server.close()
        return found

    first, second, [third] = asyncio.run(asked())  # type: ignore[misc]
    assert all(isinstance(one, ConnectionResetError) for one in (first, second, third))


def test_other_addresses_are_refused() -> None:
    with pytest.raises(ValueError, match="must be http://HOST"):
        LightClient("https://127.0.0.1")
