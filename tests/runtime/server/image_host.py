"""A real HTTP server of images on loopback, which also answers as a hostile one does."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DATA = bytes(range(256)) * 4


class ImageHost(ThreadingHTTPServer):
    """Answers by path. ``asked``: the paths and Host headers that came. ``go_on``: lets ``/slow`` send its image.
    ``most_at_once``: of ``/together``, whose first four answers wait for each other.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.go_on = threading.Event()
        self.image = DATA
        self.four = threading.Barrier(4)
        self.counted = threading.Lock()
        self.num_together = self.most_at_once = self.num_open = 0
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def port(self) -> int:
        return self.server_address[1]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


class Answer(BaseHTTPRequestHandler):
    server: ImageHost

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["host"]))
        path, _, target = self.path.partition("?")
        match path:
            case "/cat.png":
                self.answer(200, self.server.image)
            case "/to":
                self.answer(302, b"", location=target)
            case "/endless":
                self.send_response(200)
                self.end_headers()
                for _ in range(64):
                    self.wfile.write(DATA)
            case "/large":
                self.answer(200, b"", **{"content-length": str(1 << 40)})
            case "/gzip":
                self.answer(200, gzip.compress(DATA), **{"content-encoding": "gzip"})
            case "/slow":
                self.server.go_on.wait(300)
                self.answer(200, self.server.image)
            case "/together":
                with self.server.counted:
                    self.server.num_together += 1
                    self.server.num_open += 1
                    self.server.most_at_once = max(self.server.most_at_once, self.server.num_open)
                    is_first = self.server.num_together <= 4
                if is_first:
                    self.server.four.wait(300)
                with self.server.counted:
                    self.server.num_open -= 1
                self.answer(200, self.server.image)
            case _:
                self.answer(404, b"no such page")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has left
            super().handle()

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def image_host() -> Iterator[ImageHost]:
    with ImageHost() as host:
        thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield host
        finally:
            host.go_on.set()
            host.shutdown()
            thread.join()
