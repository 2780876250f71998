"""Keys and rate limits: where they come from, how they are compared, and when they run out."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.errors import ConfigurationError
from server.api import keys
from server.api.callers import TokenBucket
from server.api.keys import find_key, read_keys
from server.cli.configure import load_settings
from tests.server.benches import assert_envelope
from tests.server.support import FakeEngine, call, complete, make_app
from tests.server.test_access import ALICE, BOB, KEYS, bearer


@pytest.mark.bad_input(38)
def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time must not tell which key matched, or how far: one digest, and one constant-time
    comparison for every key, always."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(keys.secrets, "compare_digest", compare)
    for secret in (ALICE, BOB, "", "x" * 1000):
        compared.clear()
        find_key(KEYS, secret.encode())
        assert [right for _, right in compared] == [key.digest for key in KEYS]
        assert {len(left) for left, _ in compared} == {32}
    assert find_key(KEYS, ALICE.encode()) is KEYS[0]
    assert find_key(KEYS, BOB.encode()) is KEYS[1]
    assert find_key((), b"") is None


def test_keys_come_from_a_file_and_from_settings(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# for the team\n\n  carol:{'c' * 16}  \n{'d' * 16}\n")
    settings = load_settings(
        None, {"SPECSERVE_API_KEYS": f"alice:{ALICE}, {BOB}"}, {"api_key_file": str(file)}
    )
    found = settings.server_options().keys
    assert [key.name for key in found] == ["alice", "key-2", "carol", "key-4"]
    assert find_key(found, b"c" * 16) is found[2]
    for shown in (settings.to_yaml(), repr(settings), repr(found), str(settings.server_options())):
        assert ALICE not in shown
        assert BOB not in shown
        assert KEYS[0].digest.hex() not in shown


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["short"], "16 to 512"),
        (["x" * 513], "16 to 512"),
        (["with space in between"], "16 to 512"),
        (["bad name:" + ALICE], "name before the colon"),
        ([":" + ALICE], "name before the colon"),
        ([ALICE, ALICE], "twice"),
        (["a:" + ALICE, "a:" + BOB], "twice"),
        (["ключ-ключ-ключ-ключ"], "16 to 512"),
    ],
)
def test_keys_that_are_no_good(entries: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as refused:
        read_keys(entries)
    assert not any(entry.split(":")[-1] in str(refused.value) for entry in entries)


def test_key_files_that_are_no_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_keys([], tmp_path / "missing")
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(ConfigurationError, match="holds no key"):
        read_keys([], tmp_path / "empty")
    (tmp_path / "short").write_text("\nshort\n")
    with pytest.raises(ConfigurationError, match="short, line 2: a key must be"):
        read_keys([], tmp_path / "short")
    (tmp_path / "binary").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        read_keys([], tmp_path / "binary")


def test_a_wrong_type_of_keys_does_not_show_them() -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(None, {}, {"api_keys": {"secret": ALICE}})
    assert ALICE not in str(refused.value)


@pytest.mark.parametrize("how", ["SPECSERVE_API_KEYS", "SPECSERVE_API_KEY_FILE"])
def test_with_a_key_the_network_may_call(how: str) -> None:
    assert load_settings(None, {"SPECSERVE_HOST": "0.0.0.0", how: ALICE}, {}).host == "0.0.0.0"


# ------------------------------------------------------------------------------ rates


def test_a_bucket_refills_evenly_and_may_be_overdrawn() -> None:
    now = 0.0
    bucket = TokenBucket(60, lambda: now)
    assert bucket.wait() == 0
    bucket.take(60)
    assert bucket.wait() == 1
    now = 0.5
    assert bucket.wait() == 0.5
    bucket.take(100)
    assert bucket.wait() == pytest.approx(100.5)
    now = 1000
    bucket.take(0)
    assert bucket.wait() == 0
    bucket.take(59)  # it never holds more than a minute's worth
    assert bucket.wait() == 0
    bucket.take(1)
    assert bucket.wait() == 1


def post(app: FastAPI, key: str, **body: Any) -> httpx.Response:
    return call(app, "POST", "/v1/completions", json={"prompt": "x", **body}, headers=bearer(key))


def test_requests_are_limited_for_each_key() -> None:
    app = make_app(FakeEngine(), keys=KEYS, requests_per_minute=3)
    assert [post(app, ALICE).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = post(app, ALICE)
    error = assert_envelope(refused, 429)
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert post(app, BOB).status_code == 200
    assert call(app, "GET", "/v1/models", headers=bearer(ALICE)).status_code == 200
    scrape = call(app, "GET", "/metrics", headers=bearer(BOB)).text
    assert 'rejected_total{model_name="tests/fake-model",reason="rate_limited"} 2.0' in scrape


def test_tokens_are_limited_by_what_was_used() -> None:
    app = make_app(FakeEngine(), keys=KEYS, tokens_per_minute=40)
    assert post(app, ALICE, max_tokens=30).status_code == 200
    assert post(app, ALICE, max_tokens=30).status_code == 200  # 9 tokens were left
    refused = post(app, ALICE)
    assert assert_envelope(refused, 429)["code"] == "rate_limit_exceeded"
    assert 15 <= int(refused.headers["retry-after"]) <= 35  # 62 of 40 were used
    assert post(app, BOB).status_code == 200


def test_without_keys_the_limit_is_shared() -> None:
    app = make_app(FakeEngine(), requests_per_minute=1)
    assert [complete(app).status_code for _ in range(2)] == [200, 429]
    assert call(app, "GET", "/health").status_code == 200
