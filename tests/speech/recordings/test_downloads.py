"""Downloads: what is followed, what is refused, and where each bound stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from https_site import Site, redirect
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import BadInput
from speech.recordings.fetching import (
    DownloadLimitReached,
    FetchCancelled,
    Fetcher,
    FetchLimits,
    check_url,
    is_public,
)
from speech.recordings.recording import ExclusionReason, UnusableRecording

Fetch = Callable[..., bytes]


@pytest.fixture
def fetch(site: Site, tmp_path: Path) -> Fetch:
    def get(path: str, **changes: object) -> bytes:
        settings = {"allow_private": True, "ca_file": site.ca_file, "pause": 0.0, **changes}
        address = path if "://" in path else f"{site.url}{path}"
        Fetcher(FetchLimits(**settings)).fetch(address, tmp_path / "file")
        return (tmp_path / "file").read_bytes()

    return get


def test_a_file_is_fetched_as_it_is(site: Site, fetch: Fetch) -> None:
    site.answers["/a%20b.wav"] = b"\0\1" * 100_000
    assert fetch("/a b.wav?x=1&y=a%2Fb") == b"\0\1" * 100_000
    assert site.asked == ["/a%20b.wav?x=1&y=a%2Fb"]


@pytest.mark.slow
def test_redirects_are_followed_over_https_only(site: Site, fetch: Fetch) -> None:
    site.answers |= {"/old": redirect("/new"), "/new": b"here", "/plain": redirect("http://127.0.0.1/x")}
    site.answers |= {"/disk": redirect("file:///etc/passwd"), "/round": redirect("/round")}
    assert fetch("/old") == b"here"
    for path in ("/plain", "/disk"):
        with pytest.raises(UnusableRecording) as caught:
            fetch(path)
        assert caught.value.exclusion.reason is ExclusionReason.NOT_HTTPS
    with pytest.raises(UnusableRecording, match="more than 5 redirects"):
        fetch("/round")


def test_addresses_that_are_not_public_are_not_asked(site: Site, fetch: Fetch) -> None:
    for address in ("/x", "https://localhost/x", "https://[::1]/x", "https://169.254.169.254/latest"):
        with pytest.raises(UnusableRecording, match="is not a public address; --allow-private"):
            fetch(address, allow_private=False)
    assert site.asked == []


@pytest.mark.parametrize(
    "address",
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ::1 "
    "fe80::1%eth0 fc00::1 ::ffff:127.0.0.1 2002:7f00:1::".split(),
)
def test_what_is_not_public(address: str) -> None:
    assert not is_public(address)


def test_what_is_public() -> None:
    assert is_public("8.8.8.8") and is_public("2606:4700::1111") and is_public("::ffff:8.8.8.8")


def test_a_server_that_nobody_vouches_for_is_refused(site: Site, fetch: Fetch) -> None:
    with pytest.raises(UnusableRecording, match="certificate: "):
        fetch("/x", ca_file=None)
    assert site.asked == []


def test_ssl_cert_file_is_obeyed(site: Site, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    site.answers["/x"] = b"here"
    monkeypatch.setenv("SSL_CERT_FILE", str(site.ca_file))
    assert fetch("/x", ca_file=None) == b"here"


def test_a_missing_file_is_asked_for_once_and_a_busy_server_again(site: Site, fetch: Fetch) -> None:
    answers = iter([503, 429])

    def busy(handler: BaseHTTPRequestHandler) -> None:
        code = next(answers, 200)
        handler.send_response(code)
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.write(b"ok")

    site.answers["/busy"] = busy
    with pytest.raises(UnusableRecording, match="the server said 404 Not Found") as caught:
        fetch("/gone")
    assert caught.value.exclusion.is_transient
    assert fetch("/busy") == b"ok"
    assert site.asked == ["/gone", "/busy", "/busy", "/busy"]


def test_a_file_that_ends_early_is_asked_for_again_and_then_given_up(site: Site, fetch: Fetch) -> None:
    def short(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "10")
        handler.end_headers()
        handler.wfile.write(b"only")
        handler.close_connection = True

    site.answers["/short"] = short
    with pytest.raises(UnusableRecording, match=r"ended after 4 of 10 bytes.*2 attempts|IncompleteRead.*2 attempts"):
        fetch("/short", attempts=2)
    assert len(site.asked) == 2


def _endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 10_000)
    except OSError:
        pass


def test_a_large_file_ends_at_the_bound_told_or_not(site: Site, fetch: Fetch) -> None:
    site.answers |= {"/told": b"x" * 2000, "/endless": _endless}
    for path in ("/told", "/endless"):
        with pytest.raises(UnusableRecording, match="more than 1.0 kB; --max-file"):
            fetch(path, file_bytes=1000)


def test_a_file_that_never_ends_has_a_deadline_and_all_have_a_bound(site: Site, fetch: Fetch) -> None:
    site.answers["/endless"] = _endless
    with pytest.raises(UnusableRecording, match="not done after 0.05 s"):
        fetch("/endless", file_seconds=0.05)
    with pytest.raises(DownloadLimitReached):
        fetch("/endless", total_bytes=100_000)


def test_a_silent_server_is_given_up(site: Site, fetch: Fetch) -> None:
    over = threading.Event()
    site.answers["/silent"] = lambda handler: over.wait(60) and None
    with pytest.raises(UnusableRecording, match="no answer"):
        fetch("/silent", silence=0.1, attempts=1)
    over.set()


def test_an_end_that_is_asked_for_comes_at_once(site: Site, tmp_path: Path) -> None:
    asked, over = threading.Event(), threading.Event()

    def silent(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        over.wait(60)

    site.answers["/silent"] = silent
    fetcher = Fetcher(FetchLimits(allow_private=True, ca_file=site.ca_file))
    stopper = threading.Thread(target=lambda: asked.wait(60) and fetcher.cancel())
    stopper.start()
    with pytest.raises(FetchCancelled):
        fetcher.fetch(f"{site.url}/silent", tmp_path / "file")
    stopper.join()
    over.set()


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name in ("ca.pem", "gone.pem"):
        with pytest.raises(BadInput, match="no certificates in it"):
            Fetcher(FetchLimits(ca_file=tmp_path / name))


@settings(max_examples=60)
@given(st.sampled_from(["", "https://", "https:", "HTTPS://["]), st.text("[]@:%\\#?/.a0é\0 ", max_size=12) | st.text())
def test_any_text_is_an_address_or_unusable(begin: str, remainder: str) -> None:
    try:
        url_parts = check_url(begin + remainder)
    except UnusableRecording:
        return
    assert (url_parts.scheme.lower(), url_parts.username) == ("https", None) and url_parts.hostname


@pytest.mark.parametrize("host", ["xn--", "a" * 70, "ä" * 70, "a..b", "-", "%00", "☃.example.invalid"])
def test_a_strange_host_is_unusable(host: str, fetch: Fetch) -> None:
    with pytest.raises(UnusableRecording):
        fetch(f"https://{host}/x", attempts=1)
