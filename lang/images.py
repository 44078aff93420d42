"""Images and video frames: read as bytes, identified by media type, written as data URLs."""

import base64
from pathlib import Path

from ..protocol.errors import InvalidRequest, Unsupported

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def load_image(source: str | bytes) -> bytes:
    """The bytes of an image given as bytes or as a path."""
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"image {source!r} cannot be read: {error.strerror}") from None


def media_type(data: bytes) -> str:
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return name
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else "image/jpeg"


def data_url(data: bytes) -> str:
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def load_frames(path: str, num_frames: int) -> list[bytes]:
    """``num_frames`` frames of a video, evenly spread, as JPEG."""
    if num_frames < 1:
        raise InvalidRequest(f"num_frames={num_frames}: must be 1 or more")
    if not Path(path).is_file():
        raise InvalidRequest(f"video {path!r}: there is no such file")
    try:
        import cv2
    except ImportError:
        raise Unsupported(
            "video() reads frames with OpenCV, which is not installed: pip install opencv-python"
        ) from None
    video = cv2.VideoCapture(path)
    try:
        total = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        if total < 1:
            raise InvalidRequest(f"video {path!r} holds no frame that OpenCV can read")
        frames = []
        for i in range(min(num_frames, total)):
            video.set(cv2.CAP_PROP_POS_FRAMES, i * total // min(num_frames, total))
            is_read, frame = video.read()
            if is_read:
                frames.append(cv2.imencode(".jpg", frame)[1].tobytes())
        return frames
    finally:
        video.release()
