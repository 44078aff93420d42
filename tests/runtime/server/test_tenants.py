"""Tenants: the key file, limits and their headers, and what one tenant can see of another."""

import random
import threading

import httpx
import pytest
from phloem.protocol import errors
from phloem.protocol.messages import Accepted, Closed, ProgramSettings, ProgramStats
from phloem.protocol.ops import Close, Gen, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.server.tenants import (
    Account,
    Bucket,
    Keys,
    Tenant,
    duration,
    estimate,
    hash_of,
    new_key,
    presented_key,
    read_key_file,
)
from phloem.tests.runtime.server.doubles import ScriptedClient, rejecting
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

GARDEN, KITCHEN, BOSS = "phloem-garden", "phloem-kitchen", "phloem-boss"
ASK = {"prompt": "one two three", "max_tokens": 4}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def tenant(key: str, **limits: object) -> Tenant:
    return Tenant(keys=(hash_of(key),), **limits)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def served(serve):
    """``served(keys, ...)`` -> a client without a key."""

    def start(keys: Keys, engine=None, **options: object) -> httpx.Client:
        server = serve(engine, keys=keys, **options)
        del server.http.headers["authorization"]
        return server.http

    return start


# -- the key file -----------------------------------------------------------------------------------------------------


def test_a_key_file_is_read(tmp_path):
    path = tmp_path / "keys.toml"
    keys = [new_key(), new_key()]
    path.write_text(
        f'[tenants.garden]\nkeys = ["{hash_of(keys[0])}", "{hash_of(keys[1])}"]\ntokens_per_minute = 20_000\n'
        'models = ["smollm2"]\n[tenants."kit.chen"]\nkeys = []\npriority = 5\nshare_cache = "house"\n'
    )
    found = read_key_file(path)
    assert found["garden"] == Tenant(
        keys=(hash_of(keys[0]), hash_of(keys[1])), tokens_per_minute=20_000, models=("smollm2",)
    )
    assert found["kit.chen"] == Tenant(keys=(), priority=5, share_cache="house")
    loaded = Keys.of_file(path)
    assert {loaded.account(key.encode()).name for key in keys} == {"garden"}
    assert loaded.account(b"") is None and loaded.account(keys[0].encode() + b"x") is None


HASH = hash_of("a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants = 3", r"Expected `object`, got `int` - at `\$.tenants`"),
        ("[tenants]", "no tenants; add one with 'phloem keys new NAME'"),
        ("[tenants.a", "end of a table declaration"),
        ('[tenants.a]\nkeys = ["phloem-secret"]', r"tenants.a.keys\[0\] is no 'sha256:' and 64 hex digits"),
        ("[tenants.a]\nkeys = []\nrequest_per_minute = 3", "request_per_minute"),
        ("[tenants.a]\nkeys = []\ntokens_per_minute = 0", "`int` >= 1"),
        ("[tenants.a]\npriority = 1", "missing required field `keys`"),
        ('[tenants."a/b"]\nkeys = []', "'a/b' is no name of a tenant"),
        (f'[tenants.a]\nkeys = ["{HASH}"]\n[tenants.b]\nkeys = ["{HASH}"]', "'a' and 'b' have a key in common"),
        ("\x00", "key file"),
    ],
)
def test_a_wrong_key_file_is_refused_by_name_and_shows_no_key(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidRequest, match=message) as caught:
        read_key_file(path)
    assert str(path) in caught.value.message and "secret" not in caught.value.message
    with pytest.raises(errors.InvalidRequest, match="No such file"):
        read_key_file(tmp_path / "other.toml")


def test_a_broken_file_keeps_the_old_keys_and_a_good_one_replaces_them(tmp_path, caplog):
    path, clock = tmp_path / "keys.toml", Clock()
    path.write_text(f'[tenants.garden]\nkeys = ["{hash_of(GARDEN)}"]\nrequests_per_minute = 2\n')
    keys = Keys(read_key_file(path), path=path, clock=clock)
    account = keys.account(GARDEN.encode())
    account.begin_request()
    path.write_text("nonsense")
    keys.reload()
    assert "the keys stay as they were" in caplog.text and str(path) in caplog.text
    assert keys.account(GARDEN.encode()) is account
    path.write_text(
        f'[tenants.garden]\nkeys = ["{hash_of(BOSS)}"]\nrequests_per_minute = 3\n'
        f'[tenants.kitchen]\nkeys = ["{hash_of(KITCHEN)}"]\n'
    )
    keys.reload()
    assert keys.account(GARDEN.encode()) is None
    assert keys.account(BOSS.encode()) is account and keys.account(KITCHEN.encode()).name == "kitchen"
    assert dict(account.headers())[b"x-ratelimit-remaining-requests"] == b"2"  # the used one stays used
    keys.check_models(["m"])
    path.write_text(f'[tenants.kitchen]\nkeys = ["{hash_of(KITCHEN)}"]\nmodels = ["n"]\n')
    keys.reload()
    assert "'n' is not served here, only 'm'" in caplog.text and keys.account(BOSS.encode()) is account


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_bucket_never_gives_more_than_its_limit_and_the_time_allow():
    rng = random.Random(7)
    for _ in range(50):
        limit, now_s, taken = rng.randint(1, 100), 0.0, 0.0
        bucket = Bucket(limit, now_s)
        for _ in range(200):
            now_s += rng.expovariate(1)
            amount = rng.randint(1, limit)
            wait_s = bucket.wait_s(amount, now_s)
            if rng.random() < 0.3:
                now_s += wait_s
                wait_s = bucket.wait_s(amount, now_s + 1e-6)
                assert wait_s == 0
            if not wait_s:
                bucket.take(amount, now_s + 1e-6)
                taken += amount
            assert taken <= limit + (now_s + 1e-6) * limit / 60 + 1e-6
            assert bucket.level(now_s) <= limit


def test_requests_a_minute_come_back_with_time():
    clock = Clock()
    account = Account("garden", tenant(GARDEN, requests_per_minute=2), clock=clock)
    for _ in range(2):
        account.begin_request()
        account.end_request()
    with pytest.raises(errors.RateLimited, match=r"garden: the limit is 2 requests a minute; try again in 30s") as full:
        account.begin_request()
    assert full.value.retry_after_s == 30
    clock.now_s += 30
    account.begin_request()
    assert account.used.requests == 3 and account.used.refused == {"requests": 1}


def test_tokens_are_reserved_then_settled_with_what_was_used():
    clock = Clock()
    account = Account("garden", tenant(GARDEN, tokens_per_minute=100), clock=clock)
    ops = [Text(op=0, seq=0, text="x" * 40), Gen(op=1, seq=0, params=SamplingParams(max_tokens=60)), Close(op=2, seq=0)]
    assert estimate(ops, 1000) == 70 and estimate(ops, 50) == 60
    reserved = account.reserve(ops, 1000)
    with pytest.raises(errors.RateLimited, match="the request may use 70; try again in 24s"):
        account.reserve(ops, 1000)
    account.settle(reserved, ProgramStats(prompt_tokens=12, cached_tokens=5, generated_tokens=8))
    assert dict(account.headers())[b"x-ratelimit-remaining-tokens"] == b"80"
    account.settle(account.reserve(ops, 1000), ProgramStats(prompt_tokens=100, generated_tokens=100))
    assert dict(account.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    with pytest.raises(errors.RateLimited, match="try again in 1m54s"):  # 120 tokens are owed, and 70 needed
        account.reserve(ops, 1000)
    used = account.report()["used"]
    assert (used["prompt_tokens"], used["cached_tokens"], used["completion_tokens"]) == (112, 5, 108)


def test_a_request_of_more_than_a_minutes_tokens_waits_for_all_of_them():
    clock = Clock()
    account = Account("garden", tenant(GARDEN, tokens_per_minute=100), clock=clock)
    ops = [Gen(op=0, seq=0, params=SamplingParams(max_tokens=8000))]
    assert account.reserve(ops, 8192) == 100
    with pytest.raises(errors.RateLimited, match="try again in 1m0s"):
        account.reserve(ops, 8192)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1.5, "1.5s"), (60, "1m0s"), (366, "6m6s")]
)
def test_durations_read_as_openais_do(seconds, text):
    assert duration(seconds) == text


def test_a_key_comes_in_either_header():
    assert presented_key({b"authorization": b"Bearer abc"}) == b"abc"
    assert presented_key({b"authorization": b"bearer abc"}) == b"abc"
    assert presented_key({b"x-api-key": b"abc"}) == b"abc"
    assert presented_key({b"authorization": b"Basic abc"}) == b"" == presented_key({})


# -- over HTTP --------------------------------------------------------------------------------------------------------


def test_limits_are_headers_on_successes_and_a_429_beyond(served):
    clock = Clock()
    keys = Keys({"garden": tenant(GARDEN, requests_per_minute=2, tokens_per_minute=100)}, clock=clock)
    http = served(keys, StringEngine(reply=lambda prompt, op: "a b"))
    first = http.post("/v1/completions", json=ASK, headers=bearer(GARDEN))
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    wait_until(lambda: keys.account(GARDEN.encode()).used.completion_tokens == 2)
    second = http.post("/v1/completions", json=ASK | {"stream": True}, headers={"x-api-key": GARDEN})
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    third = http.post("/v1/completions", json=ASK, headers=bearer(GARDEN))
    assert third.status_code == 429 and third.json()["error"]["code"] == "rate_limit_exceeded"
    assert third.headers["retry-after"] == "30" and third.headers["x-ratelimit-remaining-requests"] == "0"
    clock.now_s += 60
    wait_until(lambda: keys.account(GARDEN.encode()).used.completion_tokens == 4)
    usage = http.get("/usage", headers=bearer(GARDEN)).json()
    assert usage["tenant"] == "garden" and usage["used"]["refused"] == {"requests": 1}
    assert usage["used"]["prompt_tokens"] == 6 and usage["used"]["completion_tokens"] == 4
    assert usage["limits"] == {"requests_per_minute": 2, "tokens_per_minute": 100, "max_concurrent": None}
    large = http.post("/v1/completions", json=ASK | {"max_tokens": 4000}, headers=bearer(GARDEN))
    assert large.status_code == 200  # capped at the minute's, which is there
    dear = http.post("/v1/completions", json=ASK | {"max_tokens": 4000}, headers=bearer(GARDEN))
    assert dear.status_code == 429 and "tokens a minute" in dear.json()["error"]["message"]


def test_concurrent_requests_are_limited_by_key_and_by_server(served):
    gate = threading.Event()

    def reply(prompt, op):
        assert gate.wait(timeout=300)
        return "done"

    keys = Keys({"garden": tenant(GARDEN, max_concurrent=1), "kitchen": tenant(KITCHEN)})
    http = served(keys, StringEngine(reply=reply), max_concurrent=2)
    answers = []

    def ask(key: str) -> None:
        answers.append(http.post("/v1/completions", json=ASK, headers=bearer(key)).status_code)

    threads = [threading.Thread(target=ask, args=(key,)) for key in (GARDEN, KITCHEN)]
    threads[0].start()
    wait_until(lambda: keys.account(GARDEN.encode()).num_running == 1)
    mine = http.post("/v1/completions", json=ASK, headers=bearer(GARDEN))
    assert (mine.status_code, mine.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "1 requests are running, the limit is 1" in mine.json()["error"]["message"]
    threads[1].start()
    wait_until(lambda: keys.account(KITCHEN.encode()).num_running == 1)
    full = http.post("/v1/completions", json=ASK, headers=bearer(KITCHEN))
    assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
    assert full.headers["retry-after"] == "1"
    assert http.get("/v1/models", headers=bearer(KITCHEN)).status_code == 200  # takes no place
    gate.set()
    for thread in threads:
        thread.join()
    assert answers == [200, 200]
    assert http.post("/v1/completions", json=ASK, headers=bearer(GARDEN)).status_code == 200


def test_a_refused_program_gives_its_tokens_back(served, serve):
    keys = Keys({"garden": tenant(GARDEN, tokens_per_minute=100)}, clock=Clock())
    http = served(keys, client=ScriptedClient(rejecting(errors.InvalidGrammar("no"))))
    for _ in range(3):
        answer = http.post("/v1/completions", json=ASK | {"max_tokens": 90}, headers=bearer(GARDEN))
        assert answer.status_code == 400
        assert answer.headers["x-ratelimit-remaining-tokens"] == "100"


def test_tenants_are_the_keys_and_cannot_be_named_by_clients(served):
    client = ScriptedClient(rejecting(errors.InvalidGrammar("seen")))
    keys = Keys(
        {
            "garden": tenant(GARDEN, priority=3),
            "kitchen": tenant(KITCHEN, share_cache="house"),
            "cellar": tenant(BOSS, share_cache="house"),
        }
    )
    http = served(keys, client=client)

    def settings(key: str, path: str = "/v1/completions", **fields: object) -> ProgramSettings:
        http.post(path, json=ASK | fields, headers=bearer(key)).raise_for_status
        return client.submits[-1].settings

    assert settings(GARDEN, user="somebody") == ProgramSettings(
        tenant="garden", priority=3, cache_salt="tenant:garden/", name="/v1/completions"
    )
    assert settings(GARDEN, tenant="garden", priority=2, cache_salt="s").cache_salt == "tenant:garden/s"
    assert client.submits[-1].settings.priority == 5
    assert settings(KITCHEN).cache_salt == settings(BOSS).cache_salt == "shared:house/"
    native = http.post("/generate", json={"text": "a", "cache_salt": "s"}, headers=bearer(KITCHEN))
    assert native.status_code == 400 and client.submits[-1].settings.cache_salt == "shared:house/s"
    named = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "model": "string"}
    http.post("/v1/messages", json=named | {"metadata": {"user_id": "them"}}, headers={"x-api-key": GARDEN})
    assert client.submits[-1].settings.tenant == "garden"
    count = len(client.submits)
    for wrong, field in (({"tenant": "kitchen"}, "tenant"), ({"priority": -1}, "priority")):
        answer = http.post("/v1/completions", json=ASK | wrong, headers=bearer(GARDEN))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    program = {"program": "p", "ops": [], "settings": {"tenant": "kitchen"}}
    assert http.post("/v1/programs", json=program, headers=bearer(GARDEN)).status_code == 400
    assert len(client.submits) == count


def test_a_long_request_on_a_thread_has_its_tenant_too(served):
    client = ScriptedClient(rejecting(errors.InvalidGrammar("seen")))
    http = served(Keys({"garden": tenant(GARDEN)}), client=client)
    body = {"prompt": "word " * 4000, "max_tokens": 1, "user": "somebody"}
    http.post("/v1/completions", json=body, headers=bearer(GARDEN))
    assert client.submits[-1].settings.tenant == "garden"


def test_models_and_operators_pages_are_for_those_who_may(served):
    keys = Keys({"garden": tenant(GARDEN, models=()), "boss": tenant(BOSS, operator=True, models=("string",))})
    http = served(keys)
    assert http.get("/v1/models", headers=bearer(GARDEN)).json()["data"] == []
    assert [m["id"] for m in http.get("/v1/models", headers=bearer(BOSS)).json()["data"]] == ["string"]
    for ask in (ASK, ASK | {"model": "string"}):
        assert http.post("/v1/completions", json=ask, headers=bearer(GARDEN)).status_code == 404
        assert http.post("/v1/completions", json=ask, headers=bearer(BOSS)).status_code == 200
    for path in ("/metrics", "/server_info", "/fleet", "/cache_tree"):
        answer = http.get(path, headers=bearer(GARDEN))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operators_only")
        assert http.get(path, headers=bearer(BOSS)).status_code != 403
    assert http.post("/flush_cache", headers=bearer(GARDEN)).status_code == 403
    assert http.post("/fleet/drain/0", headers=bearer(GARDEN)).status_code == 403
    assert http.get("/health").status_code == 200
    assert http.get("/v1/models", headers=bearer("phloem-other")).status_code == 401


def test_a_program_of_another_tenant_cannot_be_continued_or_cancelled(served):
    client = ScriptedClient(lambda submit: [Accepted(program=submit.program)])
    http = served(Keys({"garden": tenant(GARDEN), "kitchen": tenant(KITCHEN)}), client=client)
    ops = [{"t": "text", "op": 0, "seq": 0, "text": "a"}]
    with http.stream("POST", "/v1/programs", json={"program": "p", "ops": ops}, headers=bearer(GARDEN)) as stream:
        lines = stream.iter_lines()  # kept: a generator that is collected closes the response
        assert "accepted" in next(lines)
        more = {"program": "p", "ops": [{"t": "text", "op": 5, "seq": 1, "text": "a"}]}
        theirs = http.post("/v1/programs/p", json=more, headers=bearer(KITCHEN))
        assert theirs.status_code == 400 and "not running here" in theirs.json()["error"]["message"]
        assert http.delete("/v1/programs/p", headers=bearer(KITCHEN)).status_code == 200
        assert client.cancelled == [] and len(client.submits) == 1
        assert http.post("/v1/programs/p", json=more, headers=bearer(GARDEN)).status_code == 202
        assert http.delete("/v1/programs/p", headers=bearer(GARDEN)).status_code == 200
        assert client.cancelled == ["p"] and len(client.submits) == 2
        client.calls["p"].take(Closed(program="p", stats=ProgramStats()))


def test_metrics_count_by_tenant_and_only_those_of_the_file(served):
    keys = Keys({"garden": tenant(GARDEN, max_concurrent=1), "boss": tenant(BOSS, operator=True)})
    http = served(keys)
    http.post("/v1/completions", json=ASK, headers=bearer(GARDEN))
    http.post("/v1/completions", json=ASK, headers=bearer("phloem-other"))
    wait_until(lambda: keys.account(GARDEN.encode()).used.completion_tokens > 0)
    text = http.get("/metrics", headers=bearer(BOSS)).text
    assert 'phloem_tenant_requests_total{tenant="garden"} 1.0' in text
    assert 'phloem_tenant_tokens_total{kind="prompt",tenant="garden"} 3.0' in text
    assert 'phloem_tenant_requests_total{tenant="boss"} 0.0' in text
    assert text.count("phloem_tenant_requests_total{") == 2
