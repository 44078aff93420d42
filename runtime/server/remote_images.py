"""Images that a request names by ``http(s)://``: fetched from allowed hosts alone, under limits.

An allowed name that resolves to an address which is not public is refused, unless that address is allowed too: else
the owner of the name could read what only this machine can reach. The address that was checked is the one that is
called, so a second answer of the name's server changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...protocol import errors

if TYPE_CHECKING:
    import httpx

    from .image_parts import ImageUrl

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_IMAGES = 16  # of one request
MAX_REDIRECTS = 3
REQUESTS_AT_ONCE = 16  # of one server, which fetch
FETCHED_AT_ONCE = 4  # images of one request
TIMEOUT_S = 10.0  # for all images of a request, from the first one's turn on
PORTS = {"http": 80, "https": 443}
NONE_FETCHED: Mapping[str, bytes] = {}

_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.ASCII)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an image may come from. ``host``: a name, ``*.`` and the end of names, or addresses. ``port`` None: the
    scheme's own.
    """

    host: str | Network
    port: int | None = None

    def holds(self, host: str, port: int, scheme: str) -> bool:
        if port != (self.port or PORTS[scheme]):
            return False
        if isinstance(self.host, str):
            return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host
        address = _address_of(host)
        return address is not None and address in self.host


class AllowedHosts:
    """``HOST``, ``*.HOST``, an address, or a network as ``10.0.0.0/8``, with ``:PORT`` where it is not the scheme's;
    several with commas between them.
    """

    def __init__(self, lists: Sequence[str]) -> None:
        """Raises InvalidRequest for a text that is none of these."""
        self._places = tuple([_place_of(host) for hosts in lists for host in hosts.split(",")])

    def __bool__(self) -> bool:
        return bool(self._places)

    def allows(self, host: str, port: int, scheme: str) -> bool:
        return any(place.holds(host, port, scheme) for place in self._places)

    def may_call(self, address: Address) -> bool:
        """Whether a name may stand for ``address``: a public one, or one that is named."""
        address = _plain(address)
        networks = [place.host for place in self._places if not isinstance(place.host, str)]
        return any(address in network for network in networks) or (address.is_global and not address.is_multicast)


@dataclass(slots=True)
class _Left:
    """The bytes that the images of a request may still have together."""

    num_bytes: int


class RemoteImages:
    """Fetches images for the requests of a server."""

    def __init__(self, allowed: AllowedHosts, *, timeout_s: float = TIMEOUT_S) -> None:
        self._allowed = allowed
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._context: ssl.SSLContext | None = None

    async def fetch(self, images: Sequence[ImageUrl], *, max_bytes: int, max_total: int) -> Mapping[str, bytes]:
        """By URL the bytes of those of ``images`` that are remote, each fetched once, a few at a time.

        Raises Unsupported for a host that is not allowed, LimitExceeded for too many or too large images, and
        InvalidRequest for an image that cannot be had; the others are not fetched to their end then.
        """
        remote = {image.url: image for image in images if image.is_remote}
        if not remote:
            return NONE_FETCHED
        for image in remote.values():
            self._checked(image, image.url)
        if len(remote) > MAX_IMAGES:
            text = f"{len(remote):,} images to fetch, but one request may have {MAX_IMAGES}"
            raise errors.LimitExceeded(f"{text}; send the others as data URLs", where=image.where)
        left, few = _Left(max_total), asyncio.Semaphore(FETCHED_AT_ONCE)

        async def one(image: ImageUrl) -> bytes:
            async with few:
                return await self._fetch(image, max_bytes, left)

        async with self._turns:
            tasks = {url: asyncio.create_task(one(image)) for url, image in remote.items()}
            try:
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            except TimeoutError:
                pass
            finally:
                missing = [url for url, task in tasks.items() if not task.done()]
                for task in tasks.values():
                    task.cancel()
                ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for result in ended:
            if isinstance(result, Exception):
                raise result
        if missing:
            what = f"was not there within {self._timeout_s:g} s, the time for a request's images"
            raise _unfetched(remote[missing[0]], what)
        return {url: task.result() for url, task in tasks.items()}

    async def _fetch(self, image: ImageUrl, most: int, left: _Left) -> bytes:
        import httpx  # loads when the first image is fetched

        url = image.url
        for _ in range(MAX_REDIRECTS + 1):
            target = self._checked(image, url)
            addresses = await self._addresses(image, target)
            if target.scheme == "https" and self._context is None:
                self._context = await asyncio.to_thread(httpx.create_ssl_context)
            found: bytes | httpx.URL | None = None
            for address in addresses:
                try:
                    found = await self._get(image, target, address, most, left)
                    break
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    logger.info("an image of %s could not be fetched from %s: %r", target.host, address, error)
                    if not isinstance(error, httpx.ConnectError):
                        break
            if isinstance(found, bytes):
                return found
            if found is None:
                raise _unfetched(image, f"cannot be fetched from {target.host!r}")
            if target.scheme == "https" and found.scheme == "http":
                raise _unfetched(image, f"redirects from https to {found.host!r} without it")
            url = str(found)
        raise _unfetched(image, f"redirects more than {MAX_REDIRECTS} times")

    async def _get(
        self, image: ImageUrl, target: httpx.URL, address: Address, most: int, left: _Left
    ) -> bytes | httpx.URL:
        """The body, or where the answer redirects to."""
        import httpx

        # The name stays in the Host header and the certificate's check; the call goes to the address.
        called = target.copy_with(host=str(address))
        headers = {"host": target.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"}
        verify = self._context if self._context is not None else False  # False: of http alone
        async with (
            httpx.AsyncClient(verify=verify, trust_env=False, timeout=self._timeout_s) as client,
            client.stream("GET", called, headers=headers, extensions={"sni_hostname": target.host}) as answer,
        ):
            if answer.status_code in (301, 302, 303, 307, 308):
                try:
                    return target.join(answer.headers.get("location", ""))
                except httpx.InvalidURL:
                    raise _unfetched(image, "redirects to no URL") from None
            if answer.status_code != 200:
                raise _unfetched(image, f"was answered with status {answer.status_code}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise _unfetched(image, "was sent compressed, which was not asked for")
            data = bytearray()
            if answer.headers.get("content-length", "").isdecimal():
                _check_size(image, int(answer.headers["content-length"]), min(most, left.num_bytes))
            async for piece in answer.aiter_raw():
                data += piece
                _check_size(image, len(data), min(most, len(data) - len(piece) + left.num_bytes))
                left.num_bytes -= len(piece)
            return bytes(data)

    def _checked(self, image: ImageUrl, url: str) -> httpx.URL:
        """Raises where ``url``, the image's or one that it redirects to, may not be called."""
        import httpx

        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError, UnicodeError):
            raise _unfetched(image, "is no URL") from None
        if target.scheme not in PORTS or not target.host:
            text = f"{_shown(image)} leads to {str(target)[:40]!r}; only http and https are fetched"
            raise errors.Unsupported(text, where=image.where)
        if target.userinfo:
            text = f"{_shown(image)} has a user name, which is not sent; leave it out"
            raise errors.Unsupported(text, where=image.where)
        port = target.port or PORTS[target.scheme]
        if not self._allowed.allows(_host_of(target), port, target.scheme):
            place = target.host if target.port is None else f"{target.host}:{port}"
            text = f"{_shown(image)}: this server fetches no images from {place!r}; send a data URL, or start it with"
            raise errors.Unsupported(f"{text} --allow-image-hosts {place}", where=image.where)
        return target

    async def _addresses(self, image: ImageUrl, target: httpx.URL) -> list[Address]:
        """Those to call, one after the other. Raises where the name has none, or one that may not be called."""
        literal = _address_of(_host_of(target))
        if literal is not None:
            return [literal]  # it is named
        loop, port = asyncio.get_running_loop(), target.port or PORTS[target.scheme]
        try:
            found = await loop.getaddrinfo(_host_of(target), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _unfetched(image, f"has an unknown host, {target.host!r}") from None
        addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
        for address in addresses:
            if not self._allowed.may_call(address):
                logger.warning("%s stands for %s, which is not public: not called", target.host, address)
                text = f"{image.shown}: {target.host!r} has an address that is not public; send a data URL, or start"
                text = f"image URL {text} the server with that address in --allow-image-hosts too"
                raise errors.Unsupported(text, where=image.where)
        return list(dict.fromkeys(addresses))


def _place_of(text: str) -> _Place:
    host, port = text.strip().lower(), None
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*):([0-9]{1,5})", host)
    if found is not None:
        host, port = found[1], int(found[2])
        if not 0 < port < 65536:
            raise errors.InvalidRequest(f"--allow-image-hosts {text!r}: {port} is not a port; ports are 1 to 65535")
    host = host.removeprefix("[").removesuffix("]")
    try:
        return _Place(ipaddress.ip_network(host), port)
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise errors.InvalidRequest(
            f"--allow-image-hosts {text!r} is not a host; give HOST, HOST:PORT, *.HOST, an address or a network, for "
            "example images.example.com"
        )
    return _Place(host, port)


def _host_of(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _address_of(host: str) -> Address | None:
    try:
        return _plain(ipaddress.ip_address(host))
    except ValueError:
        return None


def _plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address
    return address


def _check_size(image: ImageUrl, size: int, most: int) -> None:
    if size > most:
        message = f"{_shown(image)} has {size:,} bytes or more, but the limit is {most:,}; name a smaller file"
        raise errors.LimitExceeded(message, where=image.where)


def _unfetched(image: ImageUrl, what: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{_shown(image)} {what}; send a data URL instead", where=image.where)


def _shown(image: ImageUrl) -> str:
    return f"image URL {image.shown}"
