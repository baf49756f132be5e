"""Where the operator may call to: what authors of TRTModels write is called only if the administrator listed it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_operator.adapters.addresses import Addresses, NotAllowed, origins

LISTED = Addresses(
    [
        "https://hooks.example.com",
        "http://prometheus.monitoring.svc:9090/",
        "https://*.trusted.org",
        "http://[fd00::7]:80",
    ]
)


@pytest.mark.parametrize(
    "address",
    [
        "https://hooks.example.com",
        "https://hooks.example.com/begin?for=magika",
        "https://HOOKS.example.com:443/x",
        "https://hooks.example.com./x",
        "http://prometheus.monitoring.svc:9090/api/v1/query",
        "https://a.trusted.org/x",
        "https://a.b.trusted.org/x",
        "http://[fd00::7]/x",
    ],
)
def test_a_listed_origin_is_called_whatever_the_path(address: str) -> None:
    assert LISTED.check(address).scheme in ("http", "https")


@pytest.mark.parametrize(
    "address",
    [
        "http://hooks.example.com/",  # not the scheme that was listed
        "https://hooks.example.com:8443/",
        "https://hooks.example.com.evil.org/",
        "https://evil.org/hooks.example.com",
        "https://evil.org#hooks.example.com",
        "https://evil.org\\@hooks.example.com/",
        "https://evil.org%2F@hooks.example.com/",
        "https://hooks.example.com@evil.org/",
        "https://user@hooks.example.com/",
        "https://user:secret@hooks.example.com/",
        "https://trusted.org/",  # a sub-domain was listed
        "https://nottrusted.org/",
        "https://a.trusted.org.evil.org/",
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:9090/",
        "http://localhost/",
        "http://0/",
        "http://2130706433/",
        "https://kubernetes.default.svc/api/v1/secrets",
        "file:///etc/passwd",
        "gopher://hooks.example.com/",
        "//hooks.example.com/",
        "hooks.example.com",
        "https://",
        "https:///x",
        "",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com:x/",
        "https://hooks.example.com\r\nx: y/",
    ],
)
def test_anything_else_is_not(address: str) -> None:
    with pytest.raises(NotAllowed):
        LISTED.check(address)


def test_the_refusal_names_the_setting_that_would_help() -> None:
    with pytest.raises(
        NotAllowed, match=r"http://evil\.org:80 is not on the operator's list .* TRTMODEL_ALLOWED_ADDRESSES"
    ):
        LISTED.check("http://evil.org/x?token=secret")


@pytest.mark.parametrize(
    "address", ["https://h.example.com:99999/x?token=hush", "https://[h/x?token=hush", "nothing?token=hush"]
)
def test_the_refusal_tells_no_token_of_the_address(address: str) -> None:
    with pytest.raises(NotAllowed) as e:
        LISTED.check(address)
    assert "is no address" in str(e.value)
    assert "hush" not in str(e.value)


def test_nothing_is_listed_by_default() -> None:
    with pytest.raises(NotAllowed):
        Addresses([]).check("https://hooks.example.com/")


@pytest.mark.parametrize(
    "entry", ["hooks.example.com", "https://a.org/x", "https://me@a.org", "https://a.*.org", "https://*"]
)
def test_an_entry_that_is_no_origin_is_refused(entry: str) -> None:
    with pytest.raises(ValueError):
        Addresses([entry])


def test_the_operators_own_prometheus_is_allowed_with_all_of_its_paths() -> None:
    assert origins("") == []
    own = Addresses(origins("http://mimir.monitoring.svc/prometheus"))
    assert own.check("http://mimir.monitoring.svc/prometheus/api/v1/query").port == 80


@given(st.text(max_size=60))
def test_whatever_is_written_is_either_listed_or_refused(text: str) -> None:
    try:
        url = LISTED.check(text)
    except NotAllowed:
        return
    host = (url.raw_host or "").lower().rstrip(".")
    assert host in ("hooks.example.com", "prometheus.monitoring.svc", "fd00::7") or host.endswith(".trusted.org")
