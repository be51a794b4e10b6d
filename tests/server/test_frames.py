"""Stored frames read back: exact, stitched by series, and from the right attempt."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from fp8scope_protocol.documents import from_number
from fp8scope_protocol.series import Layout, Series
from fp8scope_protocol.wire import MISSING
from fp8scope_server import read
from fp8scope_server.catalogue import Selection, merge_layouts

Jobs = Callable[..., Any]


def strict(answer: httpx.Response) -> Any:
    """The answer's JSON, refusing what JSON does not have."""
    assert answer.status_code == 200, answer.text

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(answer.content, parse_constant=refuse)


def plane(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, dtype="<f4")


def counts(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, dtype="<u8")


def frames(client: httpx.Client, run: str, metric: str, **query: Any) -> Any:
    return strict(client.get(f"/runs/{run}/frames", params={"metric": metric, **query}))


def test_values_come_back_to_the_bit(client: httpx.Client, job: Jobs) -> None:
    """Subnormals, the largest float32, -0.0 and counts over 2^53 survive; order is that of the series."""
    one = job(modules=("layers.0",))
    run = one.start()
    given = plane(1.4e-45, 3.4028235e38, -0.0)
    one.send(0, {"amax": given, "elements": counts(2**63 + 1, 2**24 + 1, 0)})
    document = frames(client, run, "amax")
    back = np.array(document["values"][0], dtype="<f4")
    assert back.tobytes() == given.tobytes()
    assert [series["role"] for series in document["series"]] == ["activation", "weight", "gradient"]
    assert frames(client, run, "elements")["values"] == [[2**63 + 1, 2**24 + 1, 0]]


def test_c3_what_is_not_finite_is_strict_json(client: httpx.Client, job: Jobs) -> None:
    """NaN and infinities are strings, what was not measured is null, and their neighbours are intact."""
    one = job()
    run = one.start()
    one.send(0, {"amax": plane(np.nan, np.inf, -np.inf, MISSING, 1.5, 2.5)}, sentinels={"loss": float("nan")})
    assert frames(client, run, "amax")["values"] == [["NaN", "Infinity", "-Infinity", None, 1.5, 2.5]]
    assert strict(client.get(f"/runs/{run}/steps"))["columns"] == {"loss": ["NaN"]}
    assert strict(client.get(f"/runs/{run}"))["loss"] == "NaN"
    for index, expected in enumerate(["NaN", "Infinity", "-Infinity", None, 1.5, 2.5]):
        cell = strict(client.get(f"/runs/{run}/cell", params={"series": index, "step": 0}))
        assert cell["metrics"] == {"amax": expected}
    for address in ("/runs", f"/runs/{run}/worst?metric=amax", f"/runs/{run}/heatmap?metric=amax",
                    f"/runs/{run}/series", f"/runs/{run}/layers", f"/runs/{run}/events"):
        strict(client.get(address))


def test_c3_signalling_nan_is_a_nan(client: httpx.Client, job: Jobs) -> None:
    """Whatever bits a NaN has, nothing that reads it fails."""
    one = job(modules=("layers.0",))
    run = one.start()
    one.send(0, {"saturation_ratio": np.full(3, 0x7F800001, dtype="<u4").view("<f4")})
    assert frames(client, run, "saturation_ratio")["values"] == [["NaN"] * 3]
    worst = strict(client.get(f"/runs/{run}/worst?metric=saturation_ratio"))
    assert [one["value"] for one in worst] == ["NaN"] * 3
    for metric in ("saturation_ratio", "amax"):
        assert client.get(f"/runs/{run}/heatmap.png?metric={metric}").status_code == 200
        strict(client.get(f"/runs/{run}/heatmap?metric={metric}"))
    assert strict(client.get(f"/runs/{run}/cell?series=0&step=0"))["metrics"] == {"saturation_ratio": "NaN"}


def test_c4_newest_attempt_wins_and_old_steps_stay(client: httpx.Client, job: Jobs) -> None:
    """Steps 0..15, crash, resume at 10..20 with other values: one value a step, no step back."""
    first = job(modules=("layers.0",))
    run = first.start()
    for step in range(16):
        first.send(step, {"amax": plane(1, 1, step)}, sentinels={"loss": 1.0})
    second = job(run=first.run, modules=("layers.0",), resume=True)
    assert second.start() == run
    for step in range(10, 21):
        second.send(step, {"amax": plane(2, 2, 100 + step)}, sentinels={"loss": 2.0})
    document = frames(client, run, "amax", role="gradient")
    assert document["steps"] == list(range(21))
    assert document["values"] == [[float(step)] for step in range(10)] + [[100.0 + s] for s in range(10, 21)]
    steps = strict(client.get(f"/runs/{run}/steps"))
    assert steps["steps"] == list(range(21))
    assert steps["columns"]["loss"] == [1.0] * 10 + [2.0] * 11
    old = frames(client, run, "amax", role="gradient", attempt=1)
    assert (old["steps"], old["values"][15]) == (list(range(16)), [15.0])
    cell = strict(client.get(f"/runs/{run}/cell", params={"series": 2, "step": 12}))
    assert cell["metrics"]["amax"] == 112.0
    attempts = strict(client.get(f"/runs/{run}"))["attempts"]
    assert [(a["number"], a["first_step"], a["last_step"]) for a in attempts] == [(1, 0, 15), (2, 10, 20)]


def test_c4_sparser_new_attempt_hides_the_old_steps_between(client: httpx.Client, job: Jobs) -> None:
    """The old attempt's step 11 is not shown between the new attempt's 10 and 12."""
    first = job(modules=("layers.0",))
    run = first.start()
    for step in (9, 11, 13):
        first.send(step, {"amax": plane(1, 1, 1)})
    second = job(run=first.run, modules=("layers.0",), resume=True)
    second.start()
    for step in (10, 12):
        second.send(step, {"amax": plane(2, 2, 2)})
    assert frames(client, run, "amax")["steps"] == [9, 10, 12]


def test_a_repeated_step_shows_its_newest_values(client: httpx.Client, job: Jobs) -> None:
    """A job that rolls back within an attempt measures step 3 again: the later batch is shown."""
    one = job(modules=("layers.0",))
    run = one.start()
    for value in (1.0, 2.0):
        one.send(3, {"amax": plane(value, value, value)})
    assert frames(client, run, "amax")["values"] == [[2.0] * 3]


def test_producers_and_growing_layouts_are_stitched_by_series(client: httpx.Client, job: Jobs) -> None:
    """Two pipeline stages, one of which later measures a layer in front of its old columns."""
    first = job(modules=("layers.0",), producer="stage0")
    run = first.start()
    second = job(run=first.run, modules=("layers.9",), producer="stage1", attempt=first.attempt)
    assert second.start() == run
    first.send(0, {"amax": plane(1, 2, 3)})
    second.send(0, {"amax": plane(7, 8, 9)})
    second.modules = ("layers.5", "layers.9")
    second.put_layout()
    first.send(1, {"amax": plane(11, 12, 13)})
    second.send(1, {"amax": plane(4, 5, 6, 17, 18, 19)})
    document = frames(client, run, "amax")
    by_name = {(one["module"], one["role"]): column
               for one, column in zip(document["series"], zip(*document["values"], strict=True), strict=True)}
    assert by_name["layers.0", "activation"] == (1, 11)
    assert by_name["layers.9", "gradient"] == (9, 19)
    assert by_name["layers.5", "weight"] == (None, 5)
    indices = {(one["module"], one["role"]): one["index"] for one in document["series"]}
    assert sorted(indices.values()) == list(range(9))
    cell = {"series": indices["layers.9", "gradient"], "step": 0}
    assert strict(client.get(f"/runs/{run}/cell", params=cell))["metrics"]["amax"] == 9


def test_an_index_never_changes_when_a_layout_grows() -> None:
    """New series get new indices; attributes are those of the newest layout; rows are ordered by depth."""
    def of(name: str, depth: int, policy: str = "current") -> Series:
        return Series(name=name, role="weight", format="e4m3", scaling="tensorwise", module=name, depth=depth,
                      policy=policy)

    small = Layout(series=(of("b", 1), of("c", 2)))
    grown = Layout(series=(of("a", 0), of("c", 2, "delayed"), of("b", 1)))
    before, after = merge_layouts([("1", small)]), merge_layouts([("1", small), ("2", grown)])
    assert [one.name for one in before.series] == ["b", "c"]
    assert [one.name for one in after.series] == ["b", "c", "a"]
    assert after.series[1].policy == "delayed"
    assert after.columns["2"].tolist() == [2, 1, 0]
    assert after.select(Selection()) == [2, 0, 1]


def test_cell_has_all_metrics_of_the_newest_sample_before(client: httpx.Client, job: Jobs) -> None:
    """Asked at step 17 with samples at 10 and 20: those of 10, with the exponent histogram."""
    one = job(modules=("layers.0",), every=10)
    run = one.start()
    for step in (10, 20):
        histogram = np.zeros((40, 3), dtype="<u8")
        histogram[step, 2] = step
        one.send(step, {"exponent_histogram": histogram, "amax": plane(1, 2, step),
                        "nan_count": counts(0, 0, step)})
    cell = strict(client.get(f"/runs/{run}/cell", params={"series": 2, "step": 17}))
    assert cell["step"] == 10
    assert cell["metrics"] == {"nan_count": 10, "amax": 10.0}
    assert cell["histogram"] == [0] * 10 + [10] + [0] * 29
    assert (cell["series"]["role"], cell["precision"]) == ("gradient", "fp8")


def test_worst_ranks_nan_first_then_by_excess(client: httpx.Client, job: Jobs) -> None:
    """Of the newest sample only; low is bad for SQNR; what was not measured is not ranked."""
    one = job(modules=("layers.0", "layers.1"))
    run = one.start()
    one.send(0, {"underflow_ratio": plane(0.9, 0.9, 0.9, 0.9, 0.9, 0.9)})
    one.send(1, {"underflow_ratio": plane(0.1, np.nan, 0.3, MISSING, np.inf, 0.2),
                 "sqnr_db": plane(31, 5, 31, 31, 20, 31)})
    worst = strict(client.get(f"/runs/{run}/worst", params={"metric": "underflow_ratio", "n": 4}))
    assert [one["value"] for one in worst] == ["NaN", "Infinity", *plane(0.3, 0.2).tolist()]
    assert {one["step"] for one in worst} == {1}
    assert worst[0]["limit"] == 0.005
    worst = strict(client.get(f"/runs/{run}/worst", params={"metric": "sqnr_db", "role": "weight"}))
    assert [from_number(one["value"]) for one in worst] == [5, 20]


def test_too_much_for_one_answer_is_refused_with_the_limit(
    client: httpx.Client, job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact values are for windows, not for whole runs: 422 names the limit and the way out."""
    monkeypatch.setattr(read, "MAX_JSON_CELLS", 20)
    one = job()
    run = one.start()
    for step in range(4):
        one.send(step, {"amax": plane(1, 2, 3, 4, 5, 6)})
    answer = client.get(f"/runs/{run}/frames", params={"metric": "amax"})
    assert answer.status_code == 422
    assert "more than 20 values; narrow it" in answer.json()["detail"]
    assert frames(client, run, "amax", first=3, module="layers.1")["values"] == [[4.0, 5.0, 6.0]]
