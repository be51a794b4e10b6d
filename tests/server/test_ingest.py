"""What probes send: stored whole, once, and to the bit, or refused with nothing stored."""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import psycopg
import pytest
import zstandard
from tests.server.conftest import Job, RunningCollector

from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.metrics import HISTOGRAM_BINS
from fp8scope_protocol.series import encode_layout
from fp8scope_protocol.wire import MAGIC, MISSING, BatchHeader, Hello, Plane, ProbeEvent, encode_hello
from fp8scope_server.settings import ServerSettings

Rows = Callable[..., list[tuple[Any, ...]]]
Jobs = Callable[..., Job]


def test_a_batch_is_there_after_its_reply(job: Jobs, rows: Rows) -> None:
    """Ledger row, frames, step, sentinels and position of an acknowledged batch can be read back."""
    one = job()
    run = one.start()
    histogram = np.arange(HISTOGRAM_BINS * 6, dtype="<u8").reshape(HISTOGRAM_BINS, 6)
    arrays = {"amax": np.arange(6, dtype="<f4"), "nan_count": np.full(6, 2**63, dtype="<u8"),
              "exponent_histogram": histogram}
    reply = one.send(7, arrays, sentinels={"loss": 2.5}, skipped=True)
    assert reply == {"acked_seq": 0, "run": run, "duplicate": False, "commands": 0, "alert": False}
    stored = rows('SELECT metric, type, rows, "values" FROM frames WHERE run_id = %s AND step = 7', run)
    assert sorted(stored) == [
        ("amax", "f4", 1, arrays["amax"].tobytes()), ("exponent_histogram", "u8", 40, histogram.tobytes()),
        ("nan_count", "u8", 1, arrays["nan_count"].tobytes())]
    assert rows("SELECT step, frames, samples FROM batches WHERE run_id = %s", run) == [(7, 3, 42 * 6)]
    assert rows("SELECT skipped, sentinels FROM steps WHERE run_id = %s", run) == [(True, {"loss": 2.5})]
    assert rows("SELECT last_seq, last_step FROM producers WHERE run_id = %s", run) == [(0, 7)]


def test_c3_nan_survives_to_the_bit(job: Jobs, rows: Rows) -> None:
    """NaNs with any payload, infinities and "not measured" come back bit by bit; 99 others stay intact."""
    one = job(modules=tuple(f"layers.{i}" for i in range(34)))
    run = one.start()
    values = np.arange(102, dtype="<f4")
    bits = values.view("<u4")
    bits[:5] = [0x7FC00000, 0x7FA00001, 0xFFC12345, 0x7F800000, 0xFF800000]
    values[5] = MISSING
    one.send(0, {"amax": values}, sentinels={"loss": float("nan"), "grad_norm": float("-inf"), "lr": 1e-3})
    assert rows('SELECT "values" FROM frames WHERE run_id = %s', run) == [(values.tobytes(),)]
    assert rows("SELECT sentinels FROM steps WHERE run_id = %s", run) == [
        ({"loss": "NaN", "grad_norm": "-Infinity", "lr": 1e-3},)]


def test_c5_a_batch_sent_again_is_a_duplicate(job: Jobs, rows: Rows) -> None:
    """After a lost reply the same batch answers 200 and adds nothing; a new one among repeats is stored."""
    one = job()
    run = one.start()
    one.send(0, one.values(), events=(ProbeEvent(kind="note", step=0, text="once"),))
    first = one.last
    again = one.post(first)
    assert (again.status_code, again.json()["duplicate"]) == (200, True)
    assert one.send(1, one.values())["duplicate"] is False
    assert one.post(first).json() == {"acked_seq": 0, "run": run, "duplicate": True, "commands": 0,
                                      "alert": False}
    assert rows("SELECT count(*) FROM batches WHERE run_id = %s", run) == [(2,)]
    assert rows("SELECT count(*) FROM frames WHERE run_id = %s", run) == [(2,)]
    assert rows("SELECT count(*) FROM events WHERE run_id = %s AND kind = 'note'", run) == [(1,)]


def test_c5_the_same_batch_from_two_connections_at_once(
    job: Jobs, collector: RunningCollector, rows: Rows
) -> None:
    """Concurrent copies of one batch are stored once and all are answered 200."""
    one = job()
    run = one.start()
    body = one.encode(0, one.values())
    answers: list[httpx.Response] = []

    def post() -> None:
        with collector.client() as client:
            answers.append(client.post(f"/runs/{run}/batches", content=body))

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 8
    assert sum(not answer.json()["duplicate"] for answer in answers) == 1
    assert rows("SELECT count(*) FROM frames WHERE run_id = %s", run) == [(1,)]


def test_two_producers_may_use_the_same_seq_and_step(job: Jobs, rows: Rows) -> None:
    """The key of a batch holds its producer; both pipeline stages are stored, and one hello lists both."""
    first = job(modules=("layers.0",), producer="0")
    second = job(modules=("layers.1",), producer="1", run=first.run, attempt=first.attempt)
    run = first.start()
    assert second.start() == run
    first.send(0, first.values())
    second.send(0, second.values())
    assert rows("SELECT producer FROM frames WHERE run_id = %s ORDER BY 1", run) == [("0",), ("1",)]
    owners = rows("SELECT module, producer FROM precision WHERE run_id = %s AND switchable ORDER BY 1", run)
    assert owners == [("layers.0", "0"), ("layers.1", "1")]
    [(names,)] = rows("SELECT jsonb_path_query_array(hello, '$.precision[*].name') FROM attempts "
                      "WHERE run_id = %s", run)
    assert {"layers.0", "layers.1"} <= set(names)


def test_unknown_attempt_and_layout_are_409(job: Jobs, rows: Rows) -> None:
    """The reply names what is missing, and the batch is taken once that was sent."""
    one = job()
    body = one.encode(0, one.values())
    answer = one.post(body)
    assert (answer.status_code, answer.json()["missing"]) == (409, "attempt")
    assert one.put_layout().json()["missing"] == "attempt"
    run = one.hello().json()["run"]
    answer = one.post(body)
    assert (answer.status_code, answer.json()["missing"]) == (409, "layout")
    assert answer.headers["content-type"] == "application/problem+json"
    assert rows("SELECT count(*) FROM batches WHERE run_id = %s", run) == [(0,)]
    assert one.put_layout().status_code == 200
    assert one.post(body).status_code == 200


def test_a_layout_known_from_another_run_is_still_missing(job: Jobs) -> None:
    """Each run keeps its own layouts, whatever the collector has decoded before."""
    one, other = job(), job()
    one.start()
    one.send(0, one.values())
    other.hello()
    assert other.post(other.encode(0, other.values())).json()["missing"] == "layout"


def test_a_name_used_again_starts_a_new_run(job: Jobs, client: httpx.Client) -> None:
    """Without resume, a used name gives name-2, then name-3; layouts go to the run of their attempt."""
    first = job()
    run = first.start()
    second, third = job(run=run), job(run=run)
    assert (second.start(), third.start()) == (f"{run}-2", f"{run}-3")
    first.send(0, first.values())
    assert first.hello().json() == {"run": run, "attempt": 1}
    assert client.put(f"/runs/{run}/layouts/{first.layout.id}",
                      content=encode_layout(first.layout)).json()["run"] == f"{run}-3"


def test_c4_a_resumed_run_counts_from_zero_again(job: Jobs, rows: Rows) -> None:
    """A resumed job is attempt 2 of the same run; its seq 0 is new data, and the old steps are kept."""
    first = job()
    run = first.start()
    for step in range(3):
        first.send(step, first.values(), sentinels={"loss": 1.0})
    second = job(run=run, resume=True)
    assert second.hello().json() == {"run": run, "attempt": 2}
    second.send(2, second.values(), sentinels={"loss": 2.0})
    kept = rows("SELECT number, seq, f.step, sentinels->'loss' FROM frames f JOIN attempts a ON a.id = "
                "attempt_id JOIN steps s USING (attempt_id, step) WHERE f.run_id = %s ORDER BY 1, 2", run)
    assert kept == [(1, 0, 0, 1.0), (1, 1, 1, 1.0), (1, 2, 2, 1.0), (2, 0, 2, 2.0)]
    assert rows("SELECT kind, step FROM events WHERE run_id = %s", run) == [("attempt", 2)]


def test_a_job_that_goes_back_within_an_attempt_keeps_both(job: Jobs, rows: Rows) -> None:
    """A step sent again with a new seq neither fails nor overwrites; the higher seq is the newer."""
    one = job()
    run = one.start()
    one.send(5, one.values(layers_0=0.1), sentinels={"loss": 1.0, "lr": 1.0})
    one.send(5, one.values(layers_0=0.2), sentinels={"loss": 2.0})
    assert rows("SELECT seq FROM frames WHERE run_id = %s ORDER BY seq", run) == [(0,), (1,)]
    assert rows("SELECT sentinels FROM steps WHERE run_id = %s", run) == [({"loss": 2.0, "lr": 1.0},)]


def test_gaps_and_losses_are_recorded(job: Jobs, rows: Rows) -> None:
    """Batches that never came, and those the probe says it lost, are events and counts."""
    one = job()
    run = one.start()
    one.send(0)
    one.seq = 4
    one.send(4, lost={"spool full": 3})
    one.send(5, lost={"spool full": 4, "rejected": 1})
    events = rows("SELECT kind, step, text FROM events WHERE run_id = %s ORDER BY id", run)
    assert events == [
        ("gap", 4, "batches 1 to 3 (3) did not come before this one"),
        ("lost", 4, "the probe lost 3 batches: spool full"),
        ("lost", 5, "the probe lost 1 batches: spool full"),
        ("lost", 5, "the probe lost 1 batches: rejected")]
    assert rows("SELECT last_seq, lost FROM producers WHERE run_id = %s", run) == [
        (5, {"spool full": 4, "rejected": 1})]


def test_counts_of_lost_batches_stay_numbers_that_json_can_hold(job: Jobs, client: httpx.Client) -> None:
    """A count over 2^53 is refused, so that the sum over producers can be read by everyone."""
    one = job()
    run = one.start()
    assert one.post(one.encode(0, lost={"rejected": 2**53 + 1})).status_code == 422
    one.send(0, lost={"rejected": 2**53})
    assert client.get(f"/runs/{run}").json()["lost"] == {"rejected": 2**53}


def test_c7_the_senders_clock_is_data_only(job: Jobs, rows: Rows) -> None:
    """Receive times are the collector's, with time zone, in the order of arrival."""
    one = job()
    run = one.start()
    one.hello(started_ns=2**62)
    one.send(1)
    one.send(0)
    times = rows("SELECT received_at, now() - received_at < interval '1 minute' FROM batches "
                 "WHERE run_id = %s ORDER BY seq", run)
    assert times[0][0] < times[1][0]
    assert times[0][0].tzinfo is not None
    assert all(recent for _, recent in times)


def _broken(one: Job) -> dict[str, bytes]:
    good = one.encode(0, one.values())
    planes = (Plane(key="amax", type="f4", rows=1),)
    fields: dict[str, Any] = {
        "run": one.run, "attempt": one.attempt, "producer": "0", "seq": 0, "step": 0, "layout": one.layout.id,
        "columns": 6, "planes": planes}

    def batch(raw: bytes = bytes(24), **changes: Any) -> bytes:
        head = msgspec.msgpack.encode(BatchHeader(**fields | changes))
        return MAGIC + len(head).to_bytes(4, "little") + head + zstandard.compress(raw)

    return {
        "empty": b"",
        "not a batch": b"{}",
        "cut short": good[:-5],
        "a flipped byte": good[:20] + bytes([good[20] ^ 0xFF]) + good[21:],
        "other number of columns": batch(bytes(20), columns=5),
        "unknown metric": batch(planes=(Plane(key="amaxx", type="f4", rows=1),)),
        "wrong type": batch(bytes(48), planes=(Plane(key="amax", type="u8", rows=1),)),
        "wrong rows": batch(bytes(48), planes=(Plane(key="amax", type="f4", rows=2),)),
        "a plane twice": batch(bytes(48), planes=planes * 2),
        "negative step": batch(step=-1),
        "step beyond 2^53": batch(step=2**60),
        "seq beyond bigint": batch(seq=2**64 - 1),
        "other version": batch(version=2),
        "unknown sentinel": batch(sentinels={"los": 1.0}),
        "nul in the producer": batch(producer="a\0b"),
        "nul in the layout": batch(layout="a\0b"),
        "absurd loss": batch(lost={"x": -1}),
        "report of a command beyond bigint": batch(
            reports=(CommandReport(id=2**63, state="applied", step=0),)),
    }


@pytest.mark.parametrize("kind", sorted(_broken(Job(client=httpx.Client(), run="r"))))
def test_broken_batches_are_refused_and_nothing_is_stored(kind: str, job: Jobs, rows: Rows) -> None:
    """400 or 422 as a problem document, and the next good batch is stored as if nothing had been."""
    one = job()
    run = one.start()
    answer = one.post(_broken(one)[kind])
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(answer.json()) >= {"title", "status", "detail"}
    counts = ("SELECT (SELECT count(*) FROM batches WHERE run_id = %s), (SELECT count(*) FROM frames WHERE "
              "run_id = %s), (SELECT count(*) FROM events WHERE run_id = %s)")
    assert rows(counts, run, run, run) == [(0, 0, 0)]
    one.seq = 0
    assert one.send(0, one.values())["duplicate"] is False


@pytest.mark.parametrize("changes", [
    {"attempt": ""}, {"attempt": "nul\0"}, {"producer": "x" * 65}, {"every": 0}, {"world_size": -1},
    {"version": 9}, {"run": "other"},
])
def test_bad_hellos_are_refused(changes: dict[str, Any], job: Jobs, rows: Rows) -> None:
    """400 or 422 that names the field; no run appears."""
    one = job()
    answer = one.hello(**changes)
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert rows("SELECT count(*) FROM runs WHERE name = %s", one.run) == [(0,)]


def test_prose_with_control_characters_is_stored_without_them(job: Jobs, rows: Rows) -> None:
    """Facts and event texts are never a reason to lose a batch."""
    one = job()
    run = one.hello(facts={"gpu": "H200\0\u202e"}).json()["run"]
    one.send(0, events=(ProbeEvent(kind="nonfinite", step=2**60, name="a\0", text="NaN\0 in\nweight"),))
    assert rows("SELECT facts FROM runs WHERE id = %s", run) == [({"gpu": "H200\ufffd\ufffd"},)]
    assert rows("SELECT name, text, step FROM events WHERE run_id = %s", run) == [
        ("a\ufffd", "NaN\ufffd in\nweight", 2**53)]


def test_layouts_are_checked(job: Jobs, client: httpx.Client) -> None:
    """A layout under another id, or bytes that are none, are 400."""
    one = job()
    one.hello()
    for path, body in (("0" * 32, encode_layout(one.layout)), (one.layout.id, b"\x00")):
        answer = client.put(f"/runs/{one.run}/layouts/{path}", params={"attempt": one.attempt}, content=body)
        assert answer.status_code == 400
    assert one.put_layout().json()["series"] == 6


def test_c6_a_large_batch_is_stored_whole(job: Jobs, rows: Rows) -> None:
    """3,000 series x 12 metrics are one batch of 36,000 values."""
    one = job(modules=tuple(f"layers.{i}" for i in range(1000)))
    run = one.start()
    keys = ("underflow_ratio", "underflow_nonzero_ratio", "zero_ratio", "distortion", "gain", "sqnr_db",
            "saturation_ratio", "amax", "rms", "mean_abs", "kurtosis", "scale_max")
    values = np.random.default_rng(0).standard_normal(3000).astype("<f4")
    one.send(0, dict.fromkeys(keys, values))
    assert rows("SELECT samples FROM batches WHERE run_id = %s", run) == [(36_000,)]
    sizes = rows('SELECT length("values") FROM frames WHERE run_id = %s', run)
    assert sizes == [(12_000,)] * 12


def test_bodies_over_the_limit_are_413(job: Jobs, collector: RunningCollector, rows: Rows) -> None:
    """Counted while they stream: with an honest Content-Length, and chunked with none."""
    one = job()
    run = one.start()
    limit = collector.settings.max_body_bytes
    with collector.client() as client:
        whole = bytes(limit + 1)
        chunks = (whole[i:i + 2**20] for i in range(0, len(whole), 2**20))
        for body in (whole, chunks):
            answer = client.post(f"/runs/{run}/batches", content=body)
            assert (answer.status_code, answer.json()["status"]) == (413, 413)
    assert rows("SELECT count(*) FROM batches WHERE run_id = %s", run) == [(0,)]
    assert one.send(0, one.values())["acked_seq"] == 0


def test_zip_bombs_are_413_unread(job: Jobs) -> None:
    """A small body whose planes would inflate over the limit is refused by what its header says, and one
    that inflates to more than its header says is broken."""
    one = job()
    one.start()
    huge = BatchHeader(run=one.run, attempt=one.attempt, producer="0", seq=0, step=0, layout=one.layout.id,
                       columns=2**28, planes=(Plane(key="amax", type="f4", rows=1),))
    small = msgspec.structs.replace(huge, columns=6)
    bomb = zstandard.compress(bytes(2**26))
    assert len(bomb) < 10_000
    for header, status in ((huge, 413), (small, 400)):
        head = msgspec.msgpack.encode(header)
        answer = one.post(MAGIC + len(head).to_bytes(4, "little") + head + bomb)
        assert answer.status_code == status


def test_an_old_producer_that_says_hello_again_changes_nothing(job: Jobs, rows: Rows) -> None:
    """The hello of an earlier attempt, replayed from a spool, does not touch the newest one's precision."""
    first = job(modules=("old",))
    run = first.start()
    second = job(run=run, resume=True, modules=("new",))
    second.start()
    first.hello()
    late = job(run=run, attempt=first.attempt, producer="late", modules=("old",))
    late.hello()
    assert rows("SELECT module FROM precision WHERE run_id = %s AND switchable", run) == [("new",)]


def test_hellos_at_once_get_runs_of_their_own(collector: RunningCollector) -> None:
    """Eight jobs that start together under one name become eight runs."""
    found: list[str] = []

    def start() -> None:
        with collector.client() as client:
            hello = Hello(run="together", attempt=str(threading.get_ident()), producer="0")
            found.append(client.post("/runs/together/attempts", content=encode_hello(hello)).json()["run"])

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["together", *(f"together-{n}" for n in range(2, 9))]


def test_a_lost_database_connection_is_503_and_heals(job: Jobs, rows: Rows) -> None:
    """When the database ends its connections, a batch is answered 503 with Retry-After, stored nowhere, and
    taken when it is sent again."""
    one = job()
    run = one.start()
    rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
         "AND datname = current_database()")
    body = one.encode(0, one.values())
    answers = [one.post(body) for _ in range(20)]
    assert answers[0].status_code == 503
    assert int(answers[0].headers["retry-after"]) >= 1
    assert answers[-1].status_code == 200
    assert rows("SELECT count(*) FROM batches WHERE run_id = %s", run) == [(1,)]


@pytest.mark.parametrize("end", ["pg_terminate_backend", "pg_cancel_backend"])
def test_a_database_that_gives_up_while_frames_are_copied_is_503(
    job: Jobs, rows: Rows, settings: ServerSettings, end: str
) -> None:
    """The batch waits for a lock on its frames when its connection is ended, or its statement alone: 503 with
    Retry-After, nothing of it stored, and taken once when it is sent again."""
    one, url = job(), settings.database_url
    assert url is not None
    run = one.start()
    body = one.encode(0, one.values())
    answers: list[httpx.Response] = []
    with psycopg.connect(host=str(url.query["host"]), user=url.username, dbname=url.database) as locking:
        locking.execute("LOCK TABLE frames IN ACCESS EXCLUSIVE MODE")
        posting = threading.Thread(target=lambda: answers.append(one.post(body)))
        posting.start()
        while not rows(f"SELECT {end}(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                       "AND starts_with(query, 'COPY frames') AND datname = current_database()"):
            time.sleep(0.01)
        posting.join()
    assert answers[0].status_code == 503
    assert int(answers[0].headers["retry-after"]) >= 1
    assert rows("SELECT count(*) FROM batches WHERE run_id = %s", run) == [(0,)]
    assert [one.post(body).json()["duplicate"] for _ in range(2)] == [False, True]
    assert rows("SELECT count(*) FROM frames WHERE run_id = %s", run) == [(1,)]
