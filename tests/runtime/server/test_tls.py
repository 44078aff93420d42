"""HTTPS with a certificate that a test's own CA signed (tests/data/tls/make.sh), with and without clients' own."""

import contextlib
import ssl
import threading
from pathlib import Path

import httpx
import pytest
from phloem import cli
from phloem.protocol.errors import InvalidRequest
from phloem.runtime.config import ConnectionLimits
from phloem.runtime.server.app import create_app, run_app
from phloem.runtime.server.listener import Tls, listen
from phloem.tests.runtime.server.doubles import MODEL, ChatML, WordTokenizer, connected
from phloem.tests.runtime.string_engine import StringEngine

FILES = Path(__file__).parents[2] / "data" / "tls"
CERT, KEY, CA = FILES / "server.pem", FILES / "server.key", FILES / "ca.pem"


@contextlib.contextmanager
def serving(tls: Tls):
    """Yields the address of a server."""
    over, ready, urls = threading.Event(), threading.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    with connected(StringEngine()) as client, listen("127.0.0.1", 0) as listener:
        app = create_app(client, WordTokenizer(), ChatML(), model_name=MODEL)
        options = {"is_over": over.is_set, "limits": ConnectionLimits(), "tls": tls}
        thread = threading.Thread(target=run_app, args=(app, listener, on_ready), kwargs=options)
        thread.start()
        try:
            assert ready.wait(timeout=300)
            yield urls[0]
        finally:
            over.set()
            thread.join(timeout=300)


def trusting(*, client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=CA)
    if client:
        context.load_cert_chain(FILES / "client.pem", FILES / "client.key")
    return context


def test_a_certificate_makes_it_https_streams_included():
    with serving(Tls(CERT, KEY)) as url, httpx.Client(verify=trusting(), timeout=300) as http:
        assert url.startswith("https://127.0.0.1:")
        body = {"prompt": "one two", "max_tokens": 5, "stream": True}
        assert http.post(f"{url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            http.get(url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", verify=ssl.create_default_context(), timeout=300)


def test_clients_need_a_certificate_where_there_is_a_ca():
    with serving(Tls(CERT, KEY, CA)) as url:
        with httpx.Client(verify=trusting(client=True), timeout=300) as http:
            assert http.get(f"{url}/health/live").json() == {"live": True}
        with httpx.Client(verify=trusting(), timeout=300) as http, pytest.raises(httpx.HTTPError):
            http.get(f"{url}/health/live")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((FILES / "none.pem", KEY), r"--tls-cert .*none.pem: No such file"),
        ((CERT, FILES / "client.key"), "are no PEM certificate with its unencrypted key"),
        ((CERT, FILES / "encrypted.key"), "are no PEM certificate with its unencrypted key"),
        ((FILES / "make.sh", KEY), "are no PEM certificate"),
        ((CERT, KEY, KEY), r"--tls-ca .*server.key is no PEM certificate"),
    ],
)
def test_wrong_files_are_named(files, message):
    with pytest.raises(InvalidRequest, match=message):
        Tls(*files)


def test_half_of_the_flags_is_an_error_before_the_model_is_looked_at(capsys):
    assert cli.main(["serve", "/no/such/model", "--tls-cert", str(CERT)]) == 2
    assert "needs both --tls-cert and --tls-key" in capsys.readouterr().err
