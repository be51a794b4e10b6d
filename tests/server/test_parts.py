"""Batches that come together or in pieces, and losses that come alone."""

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tests.server.conftest import Job

from fp8scope_protocol.bundle import join_batches
from fp8scope_protocol.documents import from_number
from fp8scope_protocol.rules import Clause, Condition, Rule

Jobs = Callable[..., Job]
Rows = Callable[..., list[tuple[Any, ...]]]


def put_part(one: Job, body: bytes, seq: int, index: int, count: int) -> httpx.Response:
    size = -(-len(body) // count)
    query: dict[str, str | int] = {"attempt": one.attempt, "producer": one.producer, "seq": seq,
                                   "index": index, "count": count}
    return one.client.put(f"/runs/{one.run}/parts", params=query, content=body[index * size:][:size])


def test_a_bundle_is_stored_as_its_batches_one_by_one(job: Jobs, client: httpx.Client, rows: Rows) -> None:
    """Two runs, one sent batch by batch and one in a bundle, read the same; again is a duplicate."""
    apart, together = job(), job()
    for one in (apart, together):
        one.start()
    values = [one.values(layers_0=0.1 * step) for step in range(5)]
    for step, arrays in enumerate(values):
        apart.send(step, arrays, sentinels={"loss": float(step)})
    body = join_batches([together.encode(step, arrays, sentinels={"loss": float(step)})
                         for step, arrays in enumerate(values)])
    answer = together.post(body)
    assert answer.json() == {"acked_seq": 4, "run": together.run, "duplicate": False, "commands": 0,
                             "alert": False}
    assert together.post(body).json()["duplicate"] is True
    for path in ("frames?metric=underflow_ratio", "steps"):
        read = [client.get(f"/runs/{one.run}/{path}").json() for one in (apart, together)]
        assert {**read[0], "attempts": None, "run": None} == {**read[1], "attempts": None, "run": None}
    assert rows("SELECT count(*) FROM events WHERE run_id = %s AND kind = 'gap'", together.run) == [(0,)]


def test_one_bad_batch_spoils_its_bundle_and_leaves_nothing(job: Jobs, rows: Rows) -> None:
    """All or nothing: the sender then sends them one by one."""
    one = job()
    run = one.start()
    good = one.encode(0, one.values())
    bad = one.encode(1, sentinels={"no_such_sentinel": 1.0})
    assert one.post(join_batches([good, bad])).status_code == 422
    assert rows("SELECT count(*) FROM batches WHERE run_id = %s", run) == [(0,)]
    assert one.post(good).status_code == 200


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 0, 2)])
def test_a_step_in_parts_is_one_step(job: Jobs, client: httpx.Client, rows: Rows,
                                     order: tuple[int, ...]) -> None:
    """In any order, with repetitions: nothing shows before the last part, then everything to the bit."""
    one = job()
    run = one.start()
    plane = np.frombuffer(np.random.default_rng(0).bytes(24), dtype="<f4")
    body = one.encode(7, {"underflow_ratio": plane}, sentinels={"loss": float("nan")})
    for index in order[:-1]:
        assert put_part(one, body, 0, index, 3).status_code == 202
    assert rows("SELECT count(*) FROM batches WHERE run_id = %s", run) == [(0,)]
    answer = put_part(one, body, 0, order[-1], 3)
    assert (answer.status_code, answer.json()["duplicate"]) == (200, False)
    [(stored,)] = rows('SELECT "values" FROM frames WHERE run_id = %s', run)
    assert stored == plane.tobytes()
    assert rows("SELECT count(*) FROM parts WHERE attempt_id = %s", one.attempt) == [(0,)]
    loss = client.get(f"/runs/{run}/steps").json()["columns"]["loss"]
    assert [str(from_number(value)) for value in loss] == ["nan"]
    assert one.post(body).json()["duplicate"] is True


def test_a_rule_judges_the_whole_step(job: Jobs, client: httpx.Client) -> None:
    """A step in parts decides what the same step in one piece decides."""
    one = job()
    run = one.start()
    over = Condition(metric="underflow_ratio", role="activation", threshold=0.5)
    rule = Rule(name="rescue", modules="layers.0", enter=Clause(conditions=(over,)))
    answer = client.put(f"/runs/{run}/rules/rescue", content=msgspec.json.encode(rule),
                        headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    body = one.encode(0, one.values(layers_0=0.9))
    for index in range(4):
        answer = put_part(one, body, 0, index, 4)
    assert answer.json()["commands"] == 1


def test_another_division_starts_over(job: Jobs, rows: Rows) -> None:
    """A sender that learns of a lower limit divides again; parts of two divisions never mix."""
    one = job()
    one.start()
    body = one.encode(0, one.values())
    assert put_part(one, body, 0, 0, 2).status_code == 202
    assert [put_part(one, body, 0, index, 4).status_code for index in (1, 2, 3)] == [202] * 3
    assert rows("SELECT count(*) FROM parts WHERE attempt_id = %s", one.attempt) == [(3,)]
    assert put_part(one, body, 0, 0, 4).status_code == 200


def test_what_is_missing_is_asked_for(job: Jobs) -> None:
    """Parts of an unknown attempt, and a whole step of an unknown layout, are 409, and nothing is stored."""
    one = job()
    body = one.encode(0, one.values())
    answer = put_part(one, body, 0, 0, 2)
    assert (answer.status_code, answer.json()["missing"]) == (409, "attempt")
    one.hello()
    assert put_part(one, body, 0, 0, 2).status_code == 202
    answer = put_part(one, body, 0, 1, 2)
    assert (answer.status_code, answer.json()["missing"]) == (409, "layout")
    one.put_layout()
    assert put_part(one, body, 0, 1, 2).status_code == 200


@pytest.mark.parametrize(("change", "status"), [
    ({"index": 2}, 422), ({"count": 0}, 422), ({"seq": -1}, 422), ({"count": 10**6}, 422), ({"seq": 5}, 400)])
def test_wrong_numbers_are_refused(job: Jobs, change: dict[str, int], status: int) -> None:
    """An index beyond the count, a count of none, and parts that make a batch of another seq."""
    one = job()
    one.start()
    body = one.encode(0, one.values())
    given = {"seq": 0, "index": 1, "count": 2} | change
    put_part(one, body, given["seq"], 0, 2)
    query: dict[str, str | int] = {"attempt": one.attempt, "producer": one.producer, **given}
    answer = one.client.put(f"/runs/{one.run}/parts", params=query, content=body[-(-len(body) // 2):])
    assert answer.status_code == status, answer.text


def test_losses_are_told_once_and_never_shrink(job: Jobs, client: httpx.Client, rows: Rows) -> None:
    """After the last batch: totals by reason, again is no news, and they add to what batches said."""
    one = job()
    run = one.start()
    one.send(0, lost={"rejected": 1})
    query = {"attempt": one.attempt, "producer": one.producer}
    for lost in ({"rejected": 3, "torn": 1}, {"rejected": 3, "torn": 1}, {"torn": 0}):
        assert client.put(f"/runs/{run}/lost", params=query, json=lost).status_code == 204
    assert client.get(f"/runs/{run}").json()["lost"] == {"rejected": 3, "torn": 1}
    told = rows("SELECT text FROM events WHERE run_id = %s AND kind = 'lost' ORDER BY id", run)
    assert [text for text, in told] == [f"the probe lost {n} batches: {reason}" for n, reason in (
        (1, "rejected"), (2, "rejected"), (1, "torn"))]
    assert client.put(f"/runs/{run}/lost", params=query, json={"torn": -1}).status_code == 422
    answer = client.put(f"/runs/{run}/lost", params=query | {"attempt": "other"}, json={"torn": 1})
    assert (answer.status_code, answer.json()["missing"]) == (409, "attempt")
