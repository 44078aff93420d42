"""Bytes of an image file to pixels, under limits. Pillow decodes; nothing else here trusts the bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from ...protocol.errors import InvalidRequest, LimitExceeded, Unsupported

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_PIXELS = 50_000_000


def open_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image:
    """The image in ``data``, of which only the header was read: ``size`` is known and its pixels are not decoded.

    Raises InvalidRequest for bytes that are no image of ``FORMATS``, LimitExceeded for more than ``max_pixels``, and
    Unsupported where Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise Unsupported("images are decoded with Pillow, which is not installed: pip install pillow") from None
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LimitExceeded(f"an image of more pixels than Pillow decodes: {error}; at most {max_pixels:,}") from None
    except UnidentifiedImageError:
        begins = data[:8].hex(" ") or "nothing"
        known = ", ".join(FORMATS)
        raise InvalidRequest(
            f"{len(data):,} bytes that begin with {begins} are no image that is read; send one of {known}"
        ) from None
    except Exception as error:  # Pillow's readers raise many kinds of errors on damaged headers
        raise InvalidRequest(f"an image whose header is damaged: {type(error).__name__}: {error}") from None
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidRequest(f"an image of {width} x {height} pixels; both sides must be at least 1")
    if width * height > max_pixels:
        pixels = f"{width:,} x {height:,} = {width * height:,} pixels"
        raise LimitExceeded(f"an image of {pixels}, but at most {max_pixels:,} are decoded; send a smaller one")
    return image


def decode_pixels(image: Image) -> Image:
    """``image`` in RGB, upright as its EXIF orientation says; transparent pixels show white. Of a GIF the first frame.

    Raises InvalidRequest where the pixels are damaged or cut off.
    """
    from PIL import Image as Images
    from PIL import ImageOps

    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if "A" in upright.getbands() or upright.info.get("transparency") is not None:
            layer = upright.convert("RGBA")
            white = Images.new("RGBA", layer.size, (255, 255, 255, 255))
            return Images.alpha_composite(white, layer).convert("RGB")
        return upright.convert("RGB")
    except Exception as error:  # as in ``open_image``
        kind = f"{image.format} image of {image.size[0]:,} x {image.size[1]:,} pixels"
        raise InvalidRequest(f"a {kind} is damaged: {type(error).__name__}: {error}") from None


def upright_size(image: Image) -> tuple[int, int]:
    """(width, height) that ``decode_pixels`` will give, from the header alone."""
    try:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    except Exception:  # damaged EXIF data turns nothing
        turned = False
    width, height = image.size
    return (height, width) if turned else (width, height)
