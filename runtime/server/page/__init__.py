"""The page at ``/``: its files, and how they are served.

The page is plain HTML, CSS and JavaScript modules; nothing is built, and nothing is loaded from elsewhere. It shows
what the routes for programs and operators answer, and holds no data, so its files need no API key.
"""

from hashlib import blake2b
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

from ..openapi import Responses, texts

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_NOT_MODIFIED: Responses = {304: {"description": "The file is the one of if-none-match."}}


def page_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = files(__name__)
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(tuple(TYPES))}


def page_routes() -> APIRouter:
    router = APIRouter()
    pages = page_files()
    tags = {name: f'"{blake2b(body, digest_size=12).hexdigest()}"' for name, body in pages.items()}

    def answer(name: str, request: Request) -> Response:
        headers = HEADERS | {"etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(pages[name], headers=headers, media_type=TYPES[name[name.rindex(".") :]])

    @router.get("/", response_class=Response, responses=texts("The page.", "text/html") | _NOT_MODIFIED)
    async def index(request: Request) -> Response:
        """The page that shows what this server does."""
        return answer("index.html", request)

    @router.get(
        "/page/{name}",
        response_class=Response,
        responses=texts("The file.", "text/css", "text/javascript", "text/html") | _NOT_MODIFIED,
    )
    async def file(name: str, request: Request) -> Response:
        """A style sheet or a script of the page."""
        if name not in pages:
            raise HTTPException(404, f"the page has no file {name!r}")
        return answer(name, request)

    return router
