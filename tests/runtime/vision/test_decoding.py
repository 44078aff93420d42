import io
import re
import struct
import zlib

import numpy as np
import pytest
from phloem.protocol.errors import InvalidRequest, LimitExceeded
from phloem.runtime.vision.decoding import decode_pixels, open_image, upright_size
from phloem.tests.runtime.vision.tiny_vision import picture
from PIL import Image


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_images_of_each_format_are_decoded(format: str) -> None:
    image = open_image(picture(1, format=format))
    assert image.size == (40, 30) and image.format == format
    pixels = np.asarray(decode_pixels(image)).astype(int)
    want = np.asarray(Image.open(io.BytesIO(picture(1)))).astype(int)
    assert pixels.shape == (30, 40, 3) and np.abs(pixels - want).mean() < 20


def test_transparent_pixels_show_white() -> None:
    data = picture(2, mode="RGBA")
    source = np.asarray(Image.open(io.BytesIO(data))).astype(float)
    alpha = source[..., 3:] / 255
    got = np.asarray(decode_pixels(open_image(data))).astype(float)
    assert np.abs(got - (source[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1.0


def test_exif_orientation_turns_an_image() -> None:
    image, exif = Image.new("RGB", (4, 2), "red"), Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    opened = open_image(file.getvalue())
    assert upright_size(opened) == (2, 4) and decode_pixels(opened).size == (2, 4)


def png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8_000, 12_000, 200_000])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side: int) -> None:
    with pytest.raises(LimitExceeded, match=r"pixels.*at most 50,000,000"):
        open_image(png(side, side))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes that begin with nothing are no image that is read; send one of JPEG, PNG, WEBP, GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "41 bytes that begin with 3c 73 76 67"),
        (b"BM" + bytes(60), "no image that is read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that is read"),
        (picture(1)[:60], "damaged|no image"),
    ],
)
def test_bytes_that_are_no_image_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_pixels(open_image(data))


def test_a_file_that_is_cut_off_is_refused() -> None:
    for format in ("PNG", "JPEG", "WEBP"):
        data = picture(3, size=(200, 200), format=format)
        with pytest.raises(InvalidRequest, match="damaged|no image"):
            decode_pixels(open_image(data[: len(data) // 2]))


def test_mutated_files_are_decoded_or_refused() -> None:
    rng = np.random.default_rng(0)
    num_refused = 0
    for format in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = np.frombuffer(picture(4, format=format), np.uint8)
        for _ in range(100):
            data = whole.copy()
            at = rng.integers(0, min(len(data), 400), 3)
            data[at] = rng.integers(0, 256, 3)
            try:
                image = decode_pixels(open_image(data.tobytes()))
            except InvalidRequest as error:
                num_refused += 1
                assert re.fullmatch(r"[^\n]+", str(error))
            else:
                assert image.mode == "RGB"
    assert num_refused > 20
