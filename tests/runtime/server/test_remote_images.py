"""Images fetched from a real HTTP server on loopback, and the hosts and addresses that are not called."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from phloem.protocol.errors import InvalidRequest, LimitExceeded, PhloemError, Unsupported
from phloem.runtime.server.image_parts import ImageUrl
from phloem.runtime.server.remote_images import AllowedHosts, RemoteImages
from phloem.tests.runtime.server.image_host import DATA, ImageHost, image_host

TLS = Path(__file__).parents[2] / "data" / "tls"


@pytest.fixture
def host() -> Iterator[ImageHost]:
    with image_host() as host:
        yield host


def fetch(urls: str | list[str], *allowed: str, max_bytes: int = 4096, timeout_s: float = 300.0) -> dict[str, bytes]:
    async def run() -> dict[str, bytes]:
        images = [ImageUrl(url) for url in ([urls] if isinstance(urls, str) else urls)]
        remote = RemoteImages(AllowedHosts(allowed), timeout_s=timeout_s)
        return dict(await remote.fetch(images, max_bytes=max_bytes, max_total=2 * max_bytes))

    return asyncio.run(run())


def test_an_image_is_fetched_once_for_each_url_of_a_request(host: ImageHost) -> None:
    here, there = host.url("/cat.png"), host.url("/cat.png?v=2")
    found = fetch([here, there, here, "data:image/png;base64,AAAA"], f"127.0.0.1:{host.port}")
    assert found == {here: DATA, there: DATA}
    assert sorted(path for path, _ in host.asked) == ["/cat.png", "/cat.png?v=2"]


def test_four_images_of_a_request_are_fetched_at_a_time(host: ImageHost) -> None:
    """Each of the four is answered once all of them have been asked for."""
    urls = [host.url(f"/together?{i}") for i in range(6)]
    found = fetch(urls, f"127.0.0.1:{host.port}", max_bytes=1 << 16)
    assert list(found) == urls and host.most_at_once == 4


def test_a_name_is_called_at_the_address_that_was_checked(host: ImageHost) -> None:
    url = host.url("/cat.png", "localhost")
    assert fetch(url, f"localhost:{host.port},127.0.0.1,::1") == {url: DATA}
    assert host.asked == [("/cat.png", f"localhost:{host.port}")]
    with pytest.raises(Unsupported, match="'localhost' has an address that is not public"):
        fetch(url, f"localhost:{host.port}")


@pytest.mark.parametrize(
    "addresses",
    [["10.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:127.0.0.1"], ["64:ff9b::a00:1"], ["fe80::1%lo"]],
)
def test_a_name_with_an_address_that_is_not_public_is_not_called(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    with pytest.raises(Unsupported, match="'a.example' has an address that is not public"):
        fetch("https://a.example/cat.png", "a.example")


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("169.254.169.254", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::", False),
        ("::1", False),
        ("fd00::1", False),
        ("2002:7f00:1::", False),
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("10.2.0.1", False),
    ],
)
def test_public_and_named_addresses_alone_may_be_called(address: str, is_public: bool) -> None:
    allowed = AllowedHosts(["a.example", "10.1.0.0/16"])
    assert allowed.may_call(ipaddress.ip_address(address)) == is_public


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("https://a.example/x", True),
        ("https://A.EXAMPLE./x", True),
        ("http://a.example/x", True),
        ("https://a.example:8443/x", False),
        ("https://b.example:8443/x", True),
        ("https://b.example/x", False),
        ("https://www.c.example/x", True),
        ("https://c.example/x", False),
        ("https://evil-a.example/x", False),
        ("https://a.example.evil/x", False),
        ("https://a.example@evil/x", False),
        ("https://user@a.example/x", False),
        ("http://10.1.0.1/x", True),
        ("http://10.2.0.1/x", False),
        ("http://[::1]:80/x", True),
        ("http://[::2]/x", False),
        ("http://2130706433/x", False),
    ],
)
def test_only_named_hosts_are_called(url: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteImages(AllowedHosts(["a.example,b.example:8443", "*.c.example,10.1.0.0/16,[::1]"]))
    called = []

    async def fetched(image: ImageUrl, *limits: object) -> bytes:
        called.append(image.url)
        return DATA

    monkeypatch.setattr(remote, "_fetch", fetched)
    coming = remote.fetch([ImageUrl(url)], max_bytes=4096, max_total=4096)
    if is_allowed:
        assert asyncio.run(coming) == {url: DATA}
    else:
        with pytest.raises(Unsupported, match="fetches no images from|has a user name"):
            asyncio.run(coming)
        assert not called


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        ("/none", InvalidRequest, "was answered with status 404; send a data URL instead"),
        ("/endless", LimitExceeded, "has [0-9,]+ bytes or more, but the limit is 4,096; name a smaller file"),
        ("/large", LimitExceeded, "has 1,099,511,627,776 bytes or more"),
        ("/gzip", InvalidRequest, "was sent compressed"),
        ("/to?http://elsewhere.example/cat.png", Unsupported, "fetches no images from 'elsewhere.example'"),
        ("/to?file:///etc/passwd", Unsupported, "leads to 'file:/etc/passwd'; only http and https are fetched"),
        ("/to?/to?/to?/to?/cat.png", InvalidRequest, "redirects more than 3 times"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(host: ImageHost, path: str, error: type[PhloemError], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        fetch(host.url(path), f"127.0.0.1:{host.port}")
    assert raised.value.where == "messages" and str(raised.value).startswith(f"image URL '{host.url(path)[:80]}")


def test_redirects_are_followed_to_allowed_hosts(host: ImageHost) -> None:
    url = host.url("/to?/to?/cat.png")
    assert fetch(url, f"127.0.0.1:{host.port}") == {url: DATA}
    assert len(host.asked) == 3


def test_a_host_that_does_not_answer_is_given_up(host: ImageHost) -> None:
    with pytest.raises(InvalidRequest, match="was not there within 0.05 s"):
        fetch(host.url("/slow"), f"127.0.0.1:{host.port}", timeout_s=0.05)


def test_an_image_that_cannot_be_had_ends_the_others(host: ImageHost) -> None:
    """Two never come; the error of the third does not wait for them."""
    with pytest.raises(InvalidRequest, match="/none.* was answered with status 404"):
        fetch([host.url("/slow"), host.url("/slow?2"), host.url("/none")], f"127.0.0.1:{host.port}")


def test_a_host_that_refuses_the_connection_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(InvalidRequest, match="cannot be fetched from '127.0.0.1'"):
        fetch(f"http://127.0.0.1:{port}/cat.png", f"127.0.0.1:{port}")


def test_images_of_a_request_are_limited_in_number_and_together(host: ImageHost) -> None:
    many = [host.url(f"/cat.png?{i}") for i in range(17)]
    with pytest.raises(LimitExceeded, match="17 images to fetch, but one request may have 16"):
        fetch(many, f"127.0.0.1:{host.port}")
    assert not host.asked
    with pytest.raises(LimitExceeded, match="but the limit is [0-9]+; name a smaller file"):
        fetch(many[:3], f"127.0.0.1:{host.port}", max_bytes=len(DATA))


def test_https_checks_the_certificate_against_the_name(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    host.socket = context.wrap_socket(host.socket, server_side=True)
    url, allowed = f"https://localhost:{host.port}/cat.png", f"localhost:{host.port},127.0.0.1,::1"
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    assert fetch(url, allowed) == {url: DATA}
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(InvalidRequest, match="cannot be fetched from 'localhost'"):
        fetch(url, allowed)


@pytest.mark.parametrize("text", ["https://a.example", "a.example/x", "", "a.example:0", "a.example:70000", "*", "a b"])
def test_a_list_of_hosts_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--allow-image-hosts"):
        AllowedHosts([text])
