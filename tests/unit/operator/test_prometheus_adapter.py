"""One number from Prometheus, or the cause why there is none; over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outside import Asked, Outside, beside, hanging, saying, until
from trtmodel_operator.adapters import calls as calls_adapter
from trtmodel_operator.adapters import prometheus
from trtmodel_operator.adapters.addresses import Addresses
from trtmodel_operator.adapters.calls import AT_ONCE_PER_HOST, CallError, Calls
from trtmodel_operator.adapters.prometheus import Prometheus, number_in


def success(kind: str, result: Any, **more: Any) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}, **more}).encode()


def vector(*values: str) -> bytes:
    return success("vector", [{"metric": {"pod": f"p{i}"}, "value": [1.5, v]} for i, v in enumerate(values)])


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (vector("0.93"), 0.93),
        (vector("-1e-3"), -0.001),
        (success("scalar", [1435781451.781, "42"]), 42.0),
        (success("vector", [{"metric": {}, "value": [1, "0"]}]), 0.0),
    ],
)
def test_a_scalar_and_a_vector_of_one_are_numbers(body: bytes, number: float) -> None:
    assert number_in(200, body) == number


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, vector(), "no series matches"),
        (200, vector("1", "2", "3"), r"3 series where one number is needed: use sum\(\)"),
        (200, vector("NaN"), "gives nan, which cannot be compared"),
        (200, vector("+Inf"), "gives inf, which cannot be compared"),
        (200, vector("-Inf"), "gives -inf"),
        (200, success("scalar", [1, "NaN"]), "gives nan"),
        (200, success("matrix", []), "gives a matrix"),
        (200, success("string", [1, "a"]), "gives a string"),
        (200, success("vector", [7]), "gives no number"),
        (200, success("vector", [{"histogram": [1, {}]}]), "gives no number"),
        (200, success("scalar", None), "gives no number"),
        (200, success("scalar", [1]), "gives no number"),
        (200, success("scalar", [1, "many"]), "gives no number: .*many"),
        (200, success("scalar", [1, 10**400]), "gives no number"),
        (200, success("scalar", [1, True]), "gives no number"),
        (200, success("scalar", "42"), "gives no number: 42"),
        (200, success("scalar", {"1": "5"}), "gives no number"),
        (204, b"", "is not JSON"),
        (200, success("scalar", [1, "5"], warnings=["a store was away"]), "not whole: .*a store was away"),
        (400, b'{"status":"error","errorType":"bad_data","error":"parse error: unexpected end"}', "parse error"),
        (503, b'{"status":"error","error":"too many"}', r"\(503\): too many"),
        (422, vector("1"), "refused"),
        (200, b"<html>login</html>", "is not JSON: <html>login"),
        (200, b"[]", "refused"),
        (200, b"[" * 100_000, "is not JSON"),
        (200, b'{"status":"success"}', "gives a None"),
        (200, b'{"status":"success","data":7}', "gives a None"),
        (502, b"", "is not JSON"),
    ],
)
def test_anything_else_is_an_error_with_the_cause(status: int, body: bytes, says: str) -> None:
    with pytest.raises(CallError, match=says):
        number_in(status, body)


@given(st.integers(100, 599), st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["status", "data", "resultType", "result", "value", "error"]), inner, max_size=4),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_answer_whatever_it_is_raises_anything_else(status: int, body: bytes) -> None:
    with contextlib.suppress(CallError):
        assert math.isfinite(number_in(status, body))


def test_the_query_goes_by_post_to_the_servers_api() -> None:
    async def scene(outside: Outside, calls: Calls) -> float:
        return await Prometheus(calls, "").ask(outside.address + "/base/", "sum(rate(x[1m])) > bool 0")

    async def with_notes(outside: Outside, calls: Calls) -> tuple[float, Outside]:
        return await scene(outside, calls), outside

    number, outside = beside(saying(vector("0.5")), with_notes)
    (asked,) = outside.asked
    assert (number, asked.path) == (0.5, "/base/api/v1/query")
    assert parse_qs(asked.body.decode()) == {"query": ["sum(rate(x[1m])) > bool 0"], "timeout": ["10s"]}


def test_without_an_address_the_operators_own_is_asked() -> None:
    async def scene(outside: Outside, calls: Calls) -> float:
        return await Prometheus(calls, outside.address).ask("", "up")

    assert beside(saying(vector("1")), scene) == 1.0


def test_without_any_address_it_says_so() -> None:
    async def scene(_: Outside, calls: Calls) -> None:
        await Prometheus(calls, "").ask("", "up")

    with pytest.raises(CallError, match="TRTMODEL_PROMETHEUS_ADDRESS"):
        beside(saying(), scene)


def test_an_address_that_is_not_listed_is_never_called() -> None:
    async def scene(outside: Outside, calls: Calls) -> list[object]:
        with pytest.raises(CallError, match="not on the operator's list"):
            await Prometheus(calls, "").ask(f"http://localhost:{outside.port}", "up")
        return list(outside.asked)

    assert beside(saying(vector("1")), scene) == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    async def scene(outside: Outside, calls: Calls) -> int:
        with pytest.raises(CallError, match="redirects are not followed"):
            await Prometheus(calls, outside.address).ask("", "up")
        return len(outside.asked)

    assert beside(saying(status=status, location="http://169.254.169.254/"), scene) == 1


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "TIMEOUT", 0.2)

    async def scene(outside: Outside, calls: Calls) -> None:
        with pytest.raises(CallError, match=r"no answer from http://127.0.0.1:\d+ within 0.2 s"):
            await Prometheus(calls, outside.address).ask("", "up")

    beside(hanging, scene)


def test_an_answer_without_end_is_given_up() -> None:
    async def scene(outside: Outside, calls: Calls) -> None:
        with pytest.raises(CallError, match="more than 1 MiB"):
            await Prometheus(calls, outside.address).ask("", "up")

    beside(saying(b"x" * (2 << 20)), scene)


def test_nobody_is_told_what_a_server_said_to_another_model() -> None:
    async def scene(outside: Outside, calls: Calls) -> list[Asked]:
        for _ in range(2):
            await Prometheus(calls, "").ask(outside.address, "up")
        return outside.asked

    # An IP address gets no cookies by default: a name does.
    asked = beside(saying(vector("1"), **{"Set-Cookie": "a=b"}), scene, host="localhost")
    assert [a.headers.get("cookie") for a in asked] == [None, None]


def test_what_is_no_http_is_told_in_one_line() -> None:
    async def scene(outside: Outside, calls: Calls) -> str:
        with pytest.raises(CallError, match=r"cannot be reached: .*gzip") as failed:
            await Prometheus(calls, "").ask(outside.address, "up")
        return str(failed.value)

    assert beside(saying(b"no gzip", **{"content-encoding": "gzip"}), scene).isprintable()


def test_a_server_that_is_not_there_is_told() -> None:
    async def scene(outside: Outside, calls: Calls) -> str:
        return outside.address

    async def asks() -> None:
        calls = Calls(Addresses([gone]))
        try:
            with pytest.raises(CallError, match="cannot be reached"):
                await Prometheus(calls, gone).ask("", "up")
        finally:
            await calls.close()

    gone = beside(saying(), scene)
    asyncio.run(asks())


def test_a_slow_server_gets_few_calls_at_a_time() -> None:
    async def reply(_: Any) -> Any:
        await asyncio.sleep(0.01)
        return await saying(vector("1"))(_)

    async def scene(outside: Outside, calls: Calls) -> Outside:
        server = Prometheus(calls, outside.address)
        await asyncio.gather(*(server.ask("", "up") for _ in range(20)))
        return outside

    outside = beside(reply, scene)
    assert len(outside.asked) == 20
    assert 1 <= outside.most_under_way <= AT_ONCE_PER_HOST


def test_where_slow_servers_have_every_place_the_others_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_adapter, "AT_ONCE", 1)
    monkeypatch.setattr(calls_adapter, "WAIT", 0.2)

    async def scene(outside: Outside, _: Calls) -> None:
        other = outside.address.replace("127.0.0.1", "localhost")
        calls = Calls(Addresses([outside.address, other]))
        slow = asyncio.create_task(calls.post(outside.address, b"", {}, 60.0))
        try:
            await until(lambda: outside.under_way == 1)
            with pytest.raises(CallError, match="1 calls to other servers are under way"):
                await calls.post(other, b"", {}, 60.0)
            assert len(outside.asked) == 1
        finally:
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            await calls.close()

    beside(hanging, scene)


def test_names_that_are_made_up_for_ever_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_adapter, "HOSTS_KEPT", 3)

    async def scene() -> int:
        calls = Calls(Addresses(["http://*.invalid"]))
        try:
            for i in range(8):
                with pytest.raises(CallError):
                    await Prometheus(calls, f"http://n{i}.invalid").ask("", "up")
            return len(calls._hosts)
        finally:
            await calls.close()

    assert asyncio.run(scene()) == 3
