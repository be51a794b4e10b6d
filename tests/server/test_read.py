"""The JSON read API: documents, refusals, heat maps and their caching."""

import io
import json
import math
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fp8scope_protocol import documents
from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.series import Series
from fp8scope_protocol.wire import MISSING, ProbeEvent
from fp8scope_server.frames import Matrix
from fp8scope_server.heatmap import paint
from fp8scope_server.palette import BF16, INF, NAMES, NAN, SATURATED, SCALE_FIRST, SCALE_LAST, palette
from fp8scope_server.scale import excess, scale_of
from fp8scope_server.steps import join

Jobs = Callable[..., Any]

NOTHING = NAMES["missing"]

REFUSED = [
    ("/runs/{run}x", 404, "near misses: {run}"),
    ("/runs/{run}x/series", 404, "near misses: {run}"),
    ("/runs/{run}x/heatmap.png?metric=amax", 404, "near misses: {run}"),
    ("/runs/{run}/frames?metric=underflow", 422, "near misses: underflow_ratio"),
    ("/runs/{run}/heatmap.png?metric=underflow", 422, "near misses: underflow_ratio"),
    ("/runs/{run}/worst?metric=amaxx", 422, "near misses: amax"),
    ("/runs/{run}/frames?metric=amax&role=weights", 422, "near misses: weight"),
    ("/runs/{run}/series?orientation=row", 422, "near misses: rowwise"),
    ("/runs/{run}/series?format=e4m4", 422, "near misses: e4m3"),
    ("/runs/{run}/series?module=layers.7", 422, "near misses: layers."),
    ("/runs/{run}/series?module=layer", 422, "near misses: layers."),
    ("/runs/{run}/cell?series=99&step=0", 422, "must be 0 to 5"),
    ("/runs/{run}/cell?series=-1&step=0", 422, "series"),
    ("/runs/{run}/frames?metric=amax&attempt=7", 422, "attempt = '7'"),
    ("/runs/{run}/frames?metric=amax&first=9&last=3", 422, "first <= last"),
    ("/runs/{run}/frames?metric=amax&first=99999999999999999999", 422, "first"),
    ("/runs/{run}/heatmap.png?metric=amax&width=5000", 422, "width"),
    ("/runs/{run}/heatmap.png?metric=amax&height=0", 422, "height"),
    ("/runs/{run}/heatmap?metric=amax&theme=sepia", 422, "dark, light"),
    ("/runs/{run}/steps?points=0", 422, "points"),
    ("/runs/{run}/events?limit=5000", 422, "limit"),
    ("/runs?limit=0", 422, "limit"),
]
"""Address, status, and what its answer must name."""


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


def picture(client: httpx.Client, run: str, **query: Any) -> npt.NDArray[np.uint8]:
    """Palette indices of the picture's pixels [height, width]."""
    answer = client.get(f"/runs/{run}/heatmap.png", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/png"
    return np.asarray(Image.open(io.BytesIO(answer.content)))


def test_run_document_says_what_was_stored(client: httpx.Client, job: Jobs) -> None:
    """Counts, losses by reason, newest step and loss, attempts; in the list and alone alike."""
    one = job(every=5)
    run = one.start()
    one.send(0, {"amax": plane(1, 2, 3, 4, 5, 6)}, sentinels={"loss": 2.5})
    one.send(1, sentinels={"loss": 2.25}, lost={"spool_full": 3})
    document = msgspec.json.decode(client.get(f"/runs/{run}").content, type=documents.RunDocument)
    assert (document.id, document.name, document.every) == (run, one.run, 5)
    assert (document.last_step, document.loss, document.active) == (1, 2.25, True)
    assert (document.samples, document.batches, document.lost) == (6, 2, {"spool_full": 3})
    assert (document.layers, document.layers_in_bf16, document.firing) == (3, 1, 0)
    assert [(one.number, one.producers) for one in document.attempts] == [(1, 1)]
    listed = msgspec.json.decode(client.get("/runs").content, type=list[documents.RunDocument])
    assert document in listed


def test_d5_run_without_a_record_has_empty_answers(client: httpx.Client, job: Jobs) -> None:
    """Hello and nothing else: no error anywhere, and a picture of nothing."""
    one = job()
    one.hello()
    run = one.run
    document = strict(client.get(f"/runs/{run}"))
    assert (document["last_step"], document["loss"], document["samples"]) == (None, None, 0)
    assert strict(client.get(f"/runs/{run}/series")) == []
    assert strict(client.get(f"/runs/{run}/frames?metric=amax&module=layers.0")) == {
        "metric": "amax", "steps": [], "series": [], "values": []}
    assert strict(client.get(f"/runs/{run}/steps")) == {"steps": [], "skipped": [], "columns": {}}
    assert strict(client.get(f"/runs/{run}/worst?metric=amax")) == []
    heatmap = strict(client.get(f"/runs/{run}/heatmap?metric=amax"))
    assert (heatmap["first"], heatmap["last"], heatmap["rows"]) == (None, None, [])
    assert "nothing was measured" in heatmap["summary"]
    assert (picture(client, run, metric="amax") == NOTHING).all()


def test_the_worst_series_name_the_worst_rank(client: httpx.Client, job: Jobs) -> None:
    """That of the very step; null where ranks were not merged, or the metric's sample is an older one."""
    one = job()
    run = one.start()
    one.send(0, {"amax": plane(1, 2, 3, 4, 5, 6), "gemm_error": plane(1, 2, 3, 4, 5, 6),
                 "worst_rank": plane(3, MISSING, 0, 1, 0, 7)})
    assert [one["rank"] for one in strict(client.get(f"/runs/{run}/worst?metric=amax"))] == [
        7, 0, 1, 0, None, 3]
    one.send(1, {"amax": plane(6, 5, 4, 3, 2, 1), "worst_rank": plane(1, 1, 1, 1, 1, 1)})
    assert [one["rank"] for one in strict(client.get(f"/runs/{run}/worst?metric=amax"))] == [1] * 6
    assert [one["rank"] for one in strict(client.get(f"/runs/{run}/worst?metric=gemm_error"))] == [None] * 6


def test_c7_a_clock_that_is_off_is_told(client: httpx.Client, job: Jobs) -> None:
    """An hour ahead, or half an hour behind: the batch that came fastest tells, and of several producers the
    one that is off most. Without a time nothing is known."""
    one = job()
    run = one.start()

    def ahead() -> Any:
        return strict(client.get(f"/runs/{run}"))["attempts"][-1]["clock_ahead_s"]

    assert ahead() is None
    one.send(0)
    assert ahead() is None
    one.send(1, sent_ns=time.time_ns() - 1800 * 10**9)
    assert ahead() == pytest.approx(-1800, abs=20)
    one.send(2, sent_ns=time.time_ns() - 7200 * 10**9)
    assert ahead() == pytest.approx(-1800, abs=20)
    one.send(3, sent_ns=time.time_ns())
    assert ahead() == pytest.approx(0, abs=20)
    other = job(run=one.run, attempt=one.attempt, producer="1")
    other.start()
    other.send(3, sent_ns=time.time_ns() + 3600 * 10**9)
    assert ahead() == pytest.approx(3600, abs=20)


def test_d5_run_with_only_nan_has_a_picture(client: httpx.Client, job: Jobs) -> None:
    """Every cell NaN: the NaN colour everywhere, and a summary that says so."""
    one = job(modules=("layers.0",))
    run = one.start()
    one.send(0, {"amax": plane(np.nan, np.nan, np.nan)}, sentinels={"loss": float("nan")})
    assert (picture(client, run, metric="amax", width=7, height=6) == NAN).all()
    assert "3 NaN" in strict(client.get(f"/runs/{run}/heatmap?metric=amax"))["summary"]


def test_heatmap_pixels_are_where_its_document_says(client: httpx.Client, job: Jobs) -> None:
    """Rows by depth, columns by step, exact colours; hover finds the same value by pixel."""
    one = job(every=2)
    run = one.start()
    one.send(0, {"underflow_ratio": plane(0, 0, 0, 0, 0, 0)})
    one.send(2, {"underflow_ratio": plane(0, 0, 0, 0, 0, 1)})
    query: dict[str, str | int] = {"metric": "underflow_ratio", "role": "gradient", "width": 8, "height": 4}
    document = strict(client.get(f"/runs/{run}/heatmap", params=query))
    assert (document["first"], document["last"], document["columns"]) == (0, 3, 2)
    assert [row["module"] for row in document["rows"]] == ["layers.0", "layers.1"]
    assert document["scale"] | {"colours": None} == {
        "low": 1e-6, "high": 1.0, "log": True, "unit": "ratio", "colours": None}
    assert "worst 1 in layers.1 (gradient) at step 2" in document["summary"]
    pixels = picture(client, run, **query)
    assert (pixels[:2] == SCALE_FIRST).all()
    assert (pixels[2:, :4] == SCALE_FIRST).all()
    assert (pixels[2:, 4:] == SCALE_LAST).all()
    x, y = 6, 3
    step = document["first"] + x * (document["last"] + 1 - document["first"]) // document["width"]
    row = document["rows"][y * len(document["rows"]) // document["height"]]
    cell = strict(client.get(f"/runs/{run}/cell", params={"series": row["index"], "step": step}))
    assert cell["metrics"] == {"underflow_ratio": 1.0}


def test_heatmap_marks_nan_inf_saturation_and_missing(client: httpx.Client, job: Jobs) -> None:
    """NaN or Inf in a tensor marks its cell on every metric's picture, not only on its own."""
    one = job()
    run = one.start()
    one.send(0, {"underflow_ratio": plane(0, 0, MISSING, np.nan, 0, 0),
                 "nan_count": counts(1, 0, 0, 0, 0, 0), "inf_count": counts(1, 2, 0, 0, 0, 0)})
    pixels = picture(client, run, metric="underflow_ratio", width=1, height=6)[:, 0]
    assert pixels.tolist() == [NAN, INF, NOTHING, NAN, SCALE_FIRST, SCALE_FIRST]
    assert SATURATED not in pixels  # current scaling: no limit of saturation applies


def test_saturation_over_its_limit_is_marked_under_delayed_scaling() -> None:
    """Where a limit applies it marks the cell on other metrics' pictures; under BF16, BF16 is shown."""
    metric = METRICS["distortion"]
    series = [Series(name=name, role="activation", format="e4m3", scaling="tensorwise", policy=policy,
                     live=True)
              for name, policy in (("a", "delayed"), ("b", "delayed"), ("c", "delayed"), ("d", "current"))]

    def matrix(*values: float) -> Matrix:
        return Matrix(steps=np.array([0]), attempts=("x",), values=plane(*values)[None],
                      missing=np.zeros((1, 4), dtype=np.bool_))

    given = {"distortion": matrix(0, 0, 0, 0), "saturation_ratio": matrix(0.5, 0.5, 0.0001, 0.5)}
    bf16 = np.array([[False, True, False, False]])
    over = excess(metric, np.zeros((1, 4)), series)
    cells = paint(metric, over, scale_of(metric, over), series, given, bf16)
    assert cells[0].tolist() == [SATURATED, BF16, SCALE_FIRST, SCALE_FIRST]


def test_heatmap_shows_bf16_from_the_applied_switch_to_the_return(client: httpx.Client, job: Jobs) -> None:
    """A layer sent to BF16 at step 2 and back at 4 is marked at 2 and 3; a NaN there stays a NaN."""
    one = job(modules=("layers.0",))
    run = one.start()
    one.send(0, {"amax": plane(1, 1, 1)})
    for number, (precision, step) in enumerate([("bf16", 2), ("fp8", 4)], start=1):
        body = {"action": {"modules": ["layers.0"], "precision": precision, "kind": "set_precision"},
                "reason": "test"}
        assert client.post(f"/runs/{run}/commands", json=body).status_code < 300
        one.send(step - 1, {"amax": plane(1, 1, 1)})
        report = CommandReport(id=number, state="applied", step=step, steps_by_rank=(step, step))
        one.send(step, {"amax": plane(1, 1, 1 if step == 4 else np.nan)}, reports=(report,))
    pixels = picture(client, run, metric="amax", width=5, height=3)
    assert (pixels == BF16).tolist() == [[False, False, True, True, False]] * 2 + [
        [False, False, False, True, False]]
    assert pixels[2, 2] == NAN
    assert "in BF16" in strict(client.get(f"/runs/{run}/heatmap?metric=amax"))["summary"]
    cells = [strict(client.get(f"/runs/{run}/cell?series=0&step={step}")) for step in (1, 3, 4)]
    assert [cell["precision"] for cell in cells] == ["fp8", "bf16", "fp8"]
    assert cells[1]["metrics"]["amax"] == 1.0


def test_a_what_if_series_is_never_marked_as_bf16(client: httpx.Client, job: Jobs) -> None:
    """A BF16 model is measured for what FP8 would do: its picture shows the values."""
    one = job(modules=("head",), live=False)  # the job's hello says that `head` runs in BF16
    run = one.start()
    one.send(0, {"underflow_ratio": plane(0, 0, 0)})
    assert (picture(client, run, metric="underflow_ratio") == SCALE_FIRST).all()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_legend_colours_are_the_pictures(client: httpx.Client, job: Jobs, theme: str) -> None:
    """A reader can look a pixel's colour up in the document's legend."""
    one = job(modules=("layers.0",))
    run = one.start()
    one.send(0, {"amax": plane(np.nan, np.inf, MISSING)})
    query: dict[str, str | int] = {"metric": "amax", "width": 1, "height": 3, "theme": theme}
    answer = client.get(f"/runs/{run}/heatmap.png", params=query)
    colours = np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB"))[:, 0]
    legend = strict(client.get(f"/runs/{run}/heatmap", params=query))["legend"]
    assert ["#" + bytes(colour).hex() for colour in colours] == [
        legend["nan"], legend["inf"], legend["missing"]]
    assert legend["bf16"] == "#" + bytes(palette(theme)[BF16]).hex()


def test_picture_is_304_until_the_run_changes(client: httpx.Client, job: Jobs) -> None:
    """The tag of an unchanged run is good; after the next batch it is not, and pixels are new."""
    one = job()
    run = one.start()
    one.send(0, one.values())
    address, query = f"/runs/{run}/heatmap.png", {"metric": "underflow_ratio"}
    answer = client.get(address, params=query)
    tag = answer.headers["etag"]
    assert answer.headers["cache-control"] == "private, no-cache"
    for sent in (tag, f'"other", {tag}', f"W/{tag}"):
        same = client.get(address, params=query, headers={"if-none-match": sent})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    one.send(1, one.values(layers_0=1.0))
    changed = client.get(address, params=query, headers={"if-none-match": tag})
    assert (changed.status_code, changed.headers["etag"] == tag) == (200, False)
    assert changed.content != answer.content


def test_what_does_not_exist_or_is_over_a_limit_is_said(client: httpx.Client, job: Jobs) -> None:
    """A problem document with near misses or the accepted range; never a 500, never an empty 200."""
    one = job()
    run = one.start()
    one.send(0, {"amax": plane(1, 2, 3, 4, 5, 6)})
    for address, status, words in REFUSED:
        answer = client.get(address.format(run=run))
        assert answer.status_code == status, (address, answer.text)
        assert answer.headers["content-type"] == "application/problem+json", address
        assert words.format(run=run) in answer.json()["detail"], address


def test_events_come_in_order_and_from_where_one_left_off(client: httpx.Client, job: Jobs) -> None:
    """Without `after` the newest ones; with it the next ones; each with its attempt."""
    one = job()
    run = one.start()
    for step in range(5):
        one.send(step, events=(ProbeEvent(kind="note", step=step, name="layers.0", text=f"note {step}"),))
    newest = strict(client.get(f"/runs/{run}/events?limit=2"))
    assert [event["text"] for event in newest] == ["note 3", "note 4"]
    every = strict(client.get(f"/runs/{run}/events?after=0"))
    assert [event["step"] for event in every] == [0, 1, 2, 3, 4]
    more = strict(client.get(f"/runs/{run}/events", params={"after": every[1]["id"], "limit": 1}))
    assert [(event["text"], event["attempt"], event["kind"]) for event in more] == [("note 2", 1, "note")]


def test_steps_of_several_producers_are_one_line(client: httpx.Client, job: Jobs) -> None:
    """The last stage knows the loss; norms take the worst; counts add up; a skip anywhere is a skip."""
    first = job(producer="stage0")
    run = first.start()
    second = job(run=first.run, producer="stage1", attempt=first.attempt, modules=("layers.9",))
    second.start()
    first.send(0, sentinels={"update_max": 3.0, "nonfinite_count": 2.0})
    second.send(0, sentinels={"update_max": 1.0, "nonfinite_count": 5.0, "loss": 1.5}, skipped=True)
    document = strict(client.get(f"/runs/{run}/steps"))
    assert document == {"steps": [0], "skipped": [True],
                        "columns": {"loss": [1.5], "update_max": [3.0], "nonfinite_count": [7.0]}}


def test_thinning_keeps_spikes_and_nan() -> None:
    """10,000 steps on 100 points: the highest loss, the NaNs, the Inf and the skip are all still there."""
    loss, norm, skipped = [1.0] * 10_000, [float(step) for step in range(10_000)], [False] * 10_000
    loss[4321], loss[7777], norm[5555], skipped[15] = 9.0, math.nan, math.inf, True
    lines = join(range(10_000), skipped, {"loss": loss, "grad_norm": norm})
    document = lines.thinned(100).document()
    assert (len(document.steps), document.steps[-1]) == (100, 9999)
    assert document.columns["loss"].count(9.0) == 1
    assert document.columns["loss"].count("NaN") == 1
    assert document.columns["grad_norm"].count("Infinity") == 1
    assert document.columns["grad_norm"][:2] == [99.0, 199.0]
    assert document.skipped.count(True) == 1
    assert lines.thinned(10_000) is lines


def test_thinning_knows_what_was_not_said() -> None:
    """A sentinel that only some steps have is null where no step of the share has it."""
    lr = [None, None, None, 0.5, None, None, None, None]
    assert join(range(8), [False] * 8, {"lr": lr}).thinned(4).document().columns == {
        "lr": [None, 0.5, None, None]}


def test_openapi_has_the_documents(client: httpx.Client, collector: Any) -> None:
    """Each JSON answer of the read API has its protocol document as schema."""
    schema = collector.app.openapi()
    names = {path: operation["get"]["responses"]["200"]["content"]["application/json"]["schema"]
             for path, operation in schema["paths"].items()
             if path.startswith("/api/v1/runs/{run}/") and "get" in operation and path.endswith(
                 ("cell", "frames", "heatmap", "steps"))}
    assert {path.rsplit("/", 1)[1]: one["$ref"].rsplit("/", 1)[1] for path, one in names.items()} == {
        "cell": "CellDocument", "frames": "FramesDocument", "heatmap": "HeatmapDocument",
        "steps": "StepsDocument"}
