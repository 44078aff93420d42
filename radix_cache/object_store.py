"""A bucket of an object store as a ``BlockStore``: S3, and servers that speak its protocol."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from .block_store import StoreEntry

NUM_REQUESTS = 8  # at once
REQUEST_S, CONNECT_S = 5.0, 1.0


class ObjectBucket(Protocol):
    """Objects by key. Errors are OSError; ``get`` raises FileNotFoundError where nothing is."""

    def get(self, key: str) -> bytes: ...
    def has(self, key: str) -> bool: ...
    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, keys: list[str]) -> None: ...
    def list(self) -> list[StoreEntry]: ...


class ObjectStore:
    """Reads do not count as a use: a block's last use is when it was written last."""

    is_near = False
    num_readers = NUM_REQUESTS

    def __init__(self, bucket: ObjectBucket, *, about: str) -> None:
        self.about = about
        self.bucket = bucket

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        if len(keys) == 1:
            return [self.bucket.has(keys[0])]
        with ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="phloem-kv-has") as pool:
            return list(pool.map(self.bucket.has, keys))

    def read(self, key: str) -> bytes | None:
        try:
            return self.bucket.get(key)
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes) -> None:
        self.bucket.put(key, data)

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self.bucket.delete(list(keys))

    def entries(self) -> list[StoreEntry]:
        return [entry for entry in self.bucket.list() if entry.key.endswith(".kv")]


def open_object_store(url: str) -> ObjectStore:
    """``s3://BUCKET/PREFIX``, with ``?endpoint=http://HOST:PORT&region=NAME`` for other servers than Amazon's.

    Keys come from where AWS's tools have them: ``AWS_ACCESS_KEY_ID`` and the other variables, or the machine's role.
    Nothing is asked of the server yet. Raises ValueError for another address, ImportError without the extra ``s3``.
    """
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    if parts.scheme != "s3" or not parts.hostname:
        raise ValueError("give s3://BUCKET/PREFIX; a folder goes to disk_cache")
    if parts.username or parts.password:
        raise ValueError("keys do not belong into the address; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    unknown = sorted(set(options) - {"endpoint", "region"})
    if unknown or parts.fragment:
        raise ValueError(
            f"{(unknown or ['#' + parts.fragment])[0]!r} is unknown; after ? give endpoint=... and region=..."
        )
    given = {name: values[-1] for name, values in options.items()}
    bucket = _S3Bucket(parts.netloc, parts.path.strip("/"), **given)
    return ObjectStore(bucket, about=f"s3://{parts.netloc}{parts.path}".rstrip("/"))


class _S3Bucket:
    """``obstore``: one wheel without dependencies, whose requests run outside the interpreter's lock."""

    def __init__(self, bucket: str, prefix: str, *, endpoint: str = "", region: str = "") -> None:
        import obstore
        from obstore.store import S3Store

        self._api: Any = obstore
        place: dict[str, Any] = {}
        if endpoint:
            if urlsplit(endpoint).scheme not in ("http", "https"):
                raise ValueError(f"endpoint={endpoint!r}: give http://HOST:PORT or https://HOST")
            place |= {"endpoint": endpoint, "virtual_hosted_style_request": False, "region": region or "us-east-1"}
        elif region:
            place["region"] = region
        client = {
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "allow_http": endpoint.startswith("http:"),
        }
        retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_S)}
        self._store: Any = S3Store(bucket, prefix=prefix or None, client_options=client, retry_config=retries, **place)

    def get(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self._api.get(self._store, key).bytes()))

    def has(self, key: str) -> bool:
        try:
            self._ask(lambda: self._api.head(self._store, key))
        except FileNotFoundError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._ask(lambda: self._api.put(self._store, key, data, use_multipart=False))

    def delete(self, keys: list[str]) -> None:
        self._ask(lambda: self._api.delete(self._store, keys))

    def list(self) -> list[StoreEntry]:
        found = self._ask(lambda: [one for page in self._api.list(self._store) for one in page])
        return [StoreEntry(one["last_modified"].timestamp(), one["size"], one["path"]) for one in found]

    def _ask(self, request: Any) -> Any:
        """Raises OSError, of one line, in place of the library's own errors."""
        try:
            return request()
        except OSError:
            raise
        except self._api.exceptions.BaseError as error:
            raise OSError(str(error).partition("\n")[0]) from None
