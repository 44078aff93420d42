"""Images in the messages of a chat: their URLs to bytes, and their places in a rendered prompt."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...protocol.errors import InvalidRequest, LimitExceeded, Unsupported
from ...protocol.messages import Welcome
from ..tokenizer.chat_template import Part

_DATA_URL = re.compile(r"data:image/[a-z+.-]+;base64,", re.ASCII)
IMAGE = {"type": "image"}  # in a message's content, for the template


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image file and the SHA-256 of its bytes, in hexadecimal digits."""

    hash: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """An image as a request names it. ``where``: the request's field. ``kind``: the part's type, for errors."""

    url: str
    where: str = "messages"
    kind: str = "image_url"

    def check(self, welcome: Welcome) -> None:
        """Raises Unsupported where the model takes no images."""
        if "image" not in welcome.capabilities:
            message = f"a content part of type {self.kind!r} is not supported: this model reads text only"
            raise Unsupported(message, where=self.where)

    @property
    def is_remote(self) -> bool:
        return self.url[:8].lower().startswith(("http://", "https://"))

    @property
    def shown(self) -> str:
        """For errors."""
        return f"{self.url[:80]!a}{'...' if len(self.url) > 80 else ''}"

    def read(self, welcome: Welcome, fetched: Mapping[str, bytes]) -> ImagePart:
        """``fetched``: the bytes of remote images, by URL.

        Raises Unsupported where the URL is no data URL and was not fetched, LimitExceeded where the image is too large,
        InvalidRequest where there is no base64.
        """
        if (data := fetched.get(self.url)) is not None:
            return _part(data, "an image", self.where)
        begin = _DATA_URL.match(self.url)
        if begin is None:
            message = f"image URL {self.shown}: images are not fetched; send a data URL (data:image/png;base64,...)"
            if self.is_remote:
                message += ", or start the server with --allow-image-hosts"
            raise Unsupported(message, where=self.where)
        most = welcome.limits.max_image_bytes
        size = (len(self.url) - begin.end()) * 3 // 4
        if size > most + 2:
            message = f"an image of {size:,} bytes, but the limit is {most:,}; send a smaller file"
            raise LimitExceeded(message, where=self.where)
        try:
            data = base64.b64decode(self.url[begin.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"a data URL whose base64 is damaged: {error}", where=self.where) from None
        return _part(data, "a data URL of an image", self.where)


def _part(data: bytes, what: str, where: str) -> ImagePart:
    if not data:
        raise InvalidRequest(f"{what} of 0 bytes", where=where)
    return ImagePart(hashlib.sha256(data).hexdigest(), data)


def joined(content: str | list[dict[str, str]], more: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """A message's content and more of it, for the template: a text, or parts where it has images."""
    if isinstance(content, str) and isinstance(more, str):
        return content + more
    return [*_parts(content), *_parts(more)]


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def with_images(parts: Sequence[Part], images: Sequence[ImagePart], *, token_id: int) -> list[Part | ImagePart]:
    """``parts`` of a rendered conversation, with the images in place of the template's image tokens, in order.

    Raises Unsupported where the template writes another number of them.
    """
    found: list[Part | ImagePart] = []
    left = iter(images)
    num_written = sum(part.count(token_id) for part in parts if not isinstance(part, str))
    if num_written != len(images):
        raise Unsupported(
            f"the model's chat template writes {num_written} images for the {len(images)} of the messages; load the "
            "model with a template that reads images",
            where="messages",
        )
    for part in parts:
        if isinstance(part, str):
            found.append(part)
            continue
        start = 0
        for at, token in enumerate(part):
            if token == token_id:
                if at > start:
                    found.append(part[start:at])
                found.append(next(left))
                start = at + 1
        if start < len(part):
            found.append(part[start:])
    return found
