"""The sender against a real HTTP server that answers by a script (peer.py)."""

import email.utils
import logging
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest

from fp8scope.control import Inbox
from fp8scope.delivery import REJECTED_NAME
from fp8scope.segment import segment_paths, spool_folder
from fp8scope.sender import Sender
from fp8scope.settings import ProbeSettings
from fp8scope.spool import Spool
from fp8scope_protocol.series import Layout, Series, encode_layout
from fp8scope_protocol.wire import Batch, BatchHeader, Hello, encode_batch, encode_hello, planes_of

RUN = "pretrain 7b, 5 %"
LAYOUT = Layout(series=(Series(name="fc1", role="activation", format="e4m3", scaling="tile 1x128"),))
WIDE = Layout(series=tuple(msgspec.structs.replace(LAYOUT.series[0], name=f"fc{i}") for i in range(1000)))


def counts(seq: int) -> Any:
    """Numbers that do not compress."""
    return np.random.default_rng(seq).integers(2**63, size=(40, 1000), dtype="<u8")


class Line:
    """A spool and its sender."""

    def __init__(self, settings: ProbeSettings, *, attempt: str = "a1", inbox: Inbox | None = None) -> None:
        self.attempt = attempt
        self.lost: Counter[str] = Counter()
        hello = encode_hello(Hello(run=RUN, attempt=attempt, producer="all"))
        folder = spool_folder(settings.spool, RUN, attempt, "all")
        self.spool = Spool(folder, limit=settings.spool_bytes, memory_limit=2**20, hello=hello)
        self.sender = Sender(self.spool, settings=settings, run=RUN, token="f8s_secret",
                             inbox=inbox, lost=self.lost)

    def put(self, *seqs: int, full: bool = False, wide: bool = False) -> None:
        """Spool the batches `seqs`; with a measurement when `full`, with one of 320 kB when `wide`."""
        layout = WIDE if wide else LAYOUT if full else None
        entry = (layout.id, encode_layout(layout)) if layout is not None else None
        for seq in seqs:
            arrays: dict[str, Any] = {"amax": np.array([1.5], dtype="<f4")} if full else {}
            if wide:
                arrays = {"exponent_histogram": counts(seq)}
            header = BatchHeader(
                run=RUN, attempt=self.attempt, producer="all", seq=seq, step=seq, lost=dict(self.lost),
                layout=layout.id if layout else None, columns=len(layout.series) if layout else 0,
                planes=planes_of(arrays))
            self.spool.append(seq, encode_batch(Batch(header=header, arrays=arrays)), entry)
        self.sender.wake()

    def close(self, seconds: float = 20.0) -> None:
        """Send what is left."""
        self.sender.close(seconds)
        self.spool.close()


Opener = Callable[..., Line]


@pytest.fixture
def open_line(tmp_path: Path, peer: Any) -> Iterator[Opener]:
    """Opens lines to the peer with short pauses; closes them after the test."""
    with ExitStack() as stack:

        def opener(*, attempt: str = "a1", inbox: Inbox | None = None, **settings: Any) -> Line:
            given = {"collector": peer.url, "spool": tmp_path / "spool", "retry_seconds": 0.05, **settings}
            line = Line(ProbeSettings(**given), attempt=attempt, inbox=inbox)
            stack.callback(line.close, 0.0)
            return line

        yield opener


def test_hello_layout_and_batches_arrive_once_in_order(peer: Any, open_line: Opener) -> None:
    """The run is announced, the layout is sent when asked for, each batch is stored once, with the token."""
    peer.start()
    line = open_line()
    line.put(0)
    line.put(1, 2, full=True)
    line.close()
    assert peer.stored() == [0, 1, 2]
    first, *rest = peer.journal()
    assert first["path"] == "/api/v1/runs/pretrain%207b%2C%205%20%25/attempts"
    assert first["token"] == "Bearer f8s_secret"
    assert [one.get("missing", one.get("layout")) for one in rest] == [None, "layout", LAYOUT.id, None, None]
    assert not segment_paths(line.spool.folder)


def test_a_run_shows_up_before_its_first_batch(peer: Any, open_line: Opener, until: Any) -> None:
    """The hello is sent at once, so that a run in its long first step is visible."""
    peer.start()
    open_line()
    until(lambda: peer.journal(attempt="a1"))
    assert peer.stored() == []


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_collector_gets_the_batch_again(peer: Any, open_line: Opener, status: int) -> None:
    """Temporary answers lose nothing and change no order."""
    peer.write("script.json", [{"status": status}, {"status": status}])
    peer.start()
    line = open_line()
    line.put(0, 1, 2)
    line.close()
    assert [one["seq"] for one in peer.journal(status=status)] == [0, 0]
    assert peer.stored() == [0, 1, 2]
    assert not line.lost


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_obeyed(peer: Any, open_line: Opener, until: Any, form: str) -> None:
    """Asked to come back in an hour, the sender does not come back within its own short pauses; closing
    then does not wait for it, and the batches stay in the spool."""
    hour = "3600" if form == "seconds" else email.utils.formatdate(time.time() + 3600, usegmt=True)
    peer.write("script.json", [{"status": 429, "headers": {"Retry-After": hour}}])
    peer.start()
    line = open_line()
    line.put(0)
    until(lambda: peer.journal(status=429))
    for seq in range(1, 20):  # new data is no reason to come back early
        line.put(seq)
        time.sleep(0.01)
    line.close(seconds=60.0)
    assert peer.stored() == []
    assert len(peer.journal(seq=0)) == 1
    assert line.spool.pending() == 20


def test_retry_after_of_a_second_is_followed_by_the_batch(peer: Any, open_line: Opener) -> None:
    """After the time the collector asked for, the batch is delivered."""
    peer.write("script.json", [{"status": 429, "headers": {"Retry-After": "1"}}])
    peer.start()
    line = open_line()
    line.put(0)
    line.close()
    assert peer.stored() == [0]


def test_a_collector_that_forgot_the_run_is_told_again(peer: Any, open_line: Opener, until: Any) -> None:
    """A restarted collector without its memory asks for hello and layout; nothing is lost."""
    peer.start()
    line = open_line()
    line.put(0, full=True)
    until(lambda: peer.stored() == [0])
    peer.stop()
    peer.start()
    line.put(1, full=True)
    line.close()
    assert peer.stored() == [0, 1]
    assert len([one for one in peer.journal(attempt="a1") if one["path"].endswith("/attempts")]) == 2


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_rejected_is_set_aside_and_counted(
    peer: Any, open_line: Opener, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch the collector will never take does not hold up the next one, and can be looked at later."""
    peer.write("script.json", [{"status": status, "body": {"title": "no"}}])
    peer.start()
    line = open_line()
    line.put(0, 1)
    line.close()
    assert peer.stored() == [1]
    assert line.lost == {"rejected": 1}
    rejected = (line.spool.folder / REJECTED_NAME).read_bytes()
    assert RUN.encode() in rejected
    assert caplog.text.count(f"rejects batch 0 ({status}") == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_said_once_and_loses_nothing(
    peer: Any, open_line: Opener, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The spool keeps growing while the token is refused, and everything goes out when it is accepted."""
    peer.write("script.json", [{"status": status}] * 4)
    peer.start()
    line = open_line()
    line.put(0, 1)
    line.close()
    assert len(peer.journal(status=status)) == 4
    assert peer.stored() == [0, 1]
    assert caplog.text.count("refuses the token") == 1


@pytest.mark.parametrize("answer", [{"status": 404}, {"status": 307, "headers": {"Location": "/"}},
                                    {"status": 200, "body": {"hello": "from a proxy"}}])
def test_an_answer_that_is_not_a_collectors_is_no_acknowledgement(
    peer: Any, open_line: Opener, answer: dict[str, Any]
) -> None:
    """A wrong address or a proxy's page, even with status 200, takes no batch out of the spool."""
    peer.write("script.json", [answer])
    peer.start()
    line = open_line()
    line.put(0)
    line.close()
    assert peer.stored() == [0]


def test_connection_refused_then_up(
    peer: Any, open_line: Opener, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches wait while nobody listens, said once, and arrive in order when the collector comes up."""
    line = open_line()
    line.put(0, 1)
    until(lambda: "no answer" in caplog.text)
    line.put(2)
    peer.start()
    until(lambda: peer.stored() == [0, 1, 2])
    assert caplog.text.count("no answer") == 1
    until(lambda: "takes batches again" in caplog.text)


def test_c5_a_response_lost_after_commit_leaves_one_row(peer: Any, open_line: Opener) -> None:
    """The collector stored the batch but its answer was lost: it is sent again, and a duplicate is fine."""
    peer.write("script.json", [{"drop": "after"}])
    peer.start()
    line = open_line()
    line.put(0)
    line.close()
    assert [one["duplicate"] for one in peer.journal(status=200)] == [False, True]
    assert line.spool.pending() == 0
    assert not line.lost


def test_batches_that_pile_up_travel_together_in_order(peer: Any, open_line: Opener, until: Any) -> None:
    """A collector that takes its time over each request gets fewer of them, in the steps' order."""
    peer.write("rules.json", {"seconds": 0.05})
    peer.start()
    line = open_line()
    line.put(*range(200))
    line.close()
    assert peer.stored() == list(range(200))
    together = [one["together"] for one in peer.journal(status=200)]
    assert together[0] == 1
    assert max(together) == 32
    assert sum(1 / batches for batches in together) < 30  # requests
    assert line.spool.pending() == 0


def test_a_request_that_gets_no_answer_is_followed_by_a_smaller_one(
    peer: Any, open_line: Opener, until: Any
) -> None:
    """A collector that needs longer for many batches than a request may take is asked for fewer at once."""
    peer.start()
    line = open_line()
    line.put(*range(70))
    until(lambda: len(peer.stored()) == 70)
    peer.stop()
    peer.write("script.json", [{}, {"drop": "after"}])  # the first one asks for the hello
    peer.start()
    line.put(*range(70, 102))
    line.close()
    assert peer.stored() == list(range(102))
    again = [one["together"] for one in peer.journal(status=200, duplicate=True)]
    assert again
    assert max(again) <= 16
    assert not line.lost


def test_one_rejected_batch_takes_no_other_with_it(peer: Any, open_line: Opener, until: Any) -> None:
    """In the middle of a bundle is a batch that the collector will never take: the others are stored."""
    peer.start()
    line = open_line(collector="http://127.0.0.1:9")
    line.put(*range(20))
    line.close(0.0)
    peer.write("rules.json", {"never": [11]})
    second = open_line(attempt="a2")
    second.close()
    assert peer.stored() == [seq for seq in range(20) if seq != 11]
    assert [one["lost"] for one in peer.journal(attempt="a1") if "lost" in one][-1] == {"rejected": 1}


def test_a_batch_over_the_limit_goes_in_parts(peer: Any, open_line: Opener) -> None:
    """The collector, or a proxy in front of it, takes no body over 100 kB: steps of 300 kB arrive whole, and
    after the first the sender knows the limit."""
    peer.write("rules.json", {"most_bytes": 100_000})
    peer.start()
    line = open_line()
    line.put(0, 1, 2, wide=True)
    line.put(3)
    line.close()
    assert peer.stored() == [0, 1, 2, 3]
    for batch in peer.batches()[:3]:
        assert np.array_equal(batch.arrays["exponent_histogram"], counts(batch.header.seq))
    assert {one["seq"] for one in peer.journal(status=413)} == {0}
    assert not line.lost


def test_below_the_smallest_part_a_batch_is_given_up(peer: Any, open_line: Opener) -> None:
    """A limit of 10 kB: what cannot be cut smaller is set aside and counted, small batches go on."""
    peer.write("rules.json", {"most_bytes": 10_000})
    peer.start()
    line = open_line()
    line.put(0, wide=True)
    line.put(1, 2)
    line.close()
    assert peer.stored() == [1, 2]
    assert line.lost == {"rejected": 1}
    assert (line.spool.folder / REJECTED_NAME).stat().st_size > 300_000
    assert peer.journal(attempt="a1")[-1]["lost"] == {"rejected": 1}


def test_parts_that_the_collector_lost_are_sent_again(peer: Any, open_line: Opener, until: Any) -> None:
    """It dies between two parts and comes back without them: the step still arrives, whole and once."""
    peer.write("rules.json", {"most_bytes": 100_000})
    peer.write("script.json", [{"status": 413}, {"status": 413}, {}, {"status": 503, "headers": {
        "Retry-After": "1"}}])
    peer.start()
    line = open_line()
    line.put(0, wide=True)
    until(lambda: peer.journal(status=503))
    peer.stop()
    (peer.folder / "script.json").unlink()
    peer.start()
    line.close()
    assert peer.stored() == [0]
    assert not line.lost


def test_what_was_lost_after_the_last_batch_is_told(peer: Any, open_line: Opener) -> None:
    """The job's last batch is rejected, so no batch can say it: the sender says it at the end."""
    peer.write("script.json", [{"status": 400}])
    peer.start()
    line = open_line()
    line.put(0)
    line.close()
    assert peer.journal(attempt="a1")[-1]["lost"] == {"rejected": 1}


def test_a_damaged_layout_costs_its_batches_only(peer: Any, open_line: Opener) -> None:
    """The layout's record is damaged on the disk: batches that need it are set aside, the others arrive."""
    crashed = open_line(collector="http://127.0.0.1:9")
    crashed.put(0)
    crashed.put(1, 2, full=True)
    crashed.put(3)
    crashed.close(0.0)
    (path,) = segment_paths(crashed.spool.folder)
    data = bytearray(path.read_bytes())
    data[data.index(encode_layout(LAYOUT)) + 3] ^= 1
    path.write_bytes(data)
    peer.start()
    open_line(attempt="a2").close()
    assert peer.stored() == [0, 3]
    assert [one["lost"] for one in peer.journal(attempt="a1") if "lost" in one][-1] == {"rejected": 2}


@pytest.mark.parametrize("host", ["collector.example", "127.0.0.1"])
def test_a_proxy_in_between(peer: Any, open_line: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                            host: str) -> None:
    """HTTP_PROXY is obeyed, where the collector's name is known to the proxy only; a collector on this
    machine is reached without it."""
    log = tmp_path / "proxied"
    command = [sys.executable, str(Path(__file__).parent / "proxy.py"), str(log), str(peer.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.stdout.readline().strip()}")
        peer.start()
        line = open_line(collector=f"http://{host}:{peer.port}")
        line.put(0, 1, 2, full=True)
        line.close()
        proxy.kill()
    assert peer.stored() == [0, 1, 2]
    seen = log.read_text().split() if log.exists() else []
    assert {urlsplit(address).hostname for address in seen} == ({host} if host != "127.0.0.1" else set())


def test_c4_an_earlier_attempt_is_sent_before_this_one(peer: Any, open_line: Opener) -> None:
    """What a crashed attempt left in the spool goes out first, under its own attempt and hello."""
    crashed = open_line(attempt="a1", collector="http://127.0.0.1:9")
    crashed.put(0, 1, full=True)
    crashed.close(0.0)
    peer.start()
    line = open_line(attempt="a2")
    line.put(0)
    line.close()
    stored = [(one["attempt"], one["seq"]) for one in peer.journal(status=200)]
    assert stored == [("a1", 0), ("a1", 1), ("a2", 0)]
    assert not crashed.spool.folder.exists()


def test_closing_says_what_remains_and_keeps_it(peer: Any, open_line: Opener) -> None:
    """Closing with an unreachable collector comes back, and the batches are still in the spool."""
    line = open_line(collector="http://127.0.0.1:9")
    line.put(0, 1, 2)
    line.close(0.2)
    assert line.spool.pending() == 3
    (path,) = segment_paths(line.spool.folder)
    assert path.stat().st_size > 0


def test_closing_interrupts_a_long_pause(
    peer: Any, open_line: Opener, until: Any, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sender in the middle of an hour's pause tries once more when it is closed."""
    monkeypatch.setattr(random, "uniform", lambda low, high: 3600.0)
    line = open_line()
    line.put(0)
    until(lambda: "no answer" in caplog.text)
    peer.start()
    line.close()
    assert peer.stored() == [0]


def test_commands_are_polled_and_fetched_at_once_when_a_reply_names_them(
    peer: Any, open_line: Opener, until: Any
) -> None:
    """A reply that names a higher command id triggers a poll long before the next one is due."""
    inbox = Inbox()
    peer.start()
    line = open_line(inbox=inbox, poll_seconds=3600.0)
    until(lambda: peer.journal(method="GET"))
    action = {"kind": "set_precision", "modules": ["fc1"], "precision": "bf16"}
    unknown = {"id": 7, "action": {"kind": "reboot"}, "issued_by": "user"}
    peer.write("commands.json", [{"id": 3, "action": action, "issued_by": "user"}, unknown])
    line.put(0)
    until(lambda: inbox.known == 3)
    (command,), late = inbox.take(step=10)
    assert (command.id, command.action.modules, late) == (3, ("fc1",), ())
    assert peer.journal(method="GET")[0]["path"].endswith("/commands?attempt=a1")


def test_a_job_that_logs_everything_is_not_drowned(
    peer: Any, open_line: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """httpx's line per request does not reach the log of the training job."""
    caplog.set_level(logging.INFO)
    peer.start()
    line = open_line()
    line.put(0, 1)
    line.close()
    assert "HTTP Request" not in caplog.text


def test_certificates_that_are_missing_reach_nobody(
    peer: Any, open_line: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What httpx raises when it is set up is not raised where the probe is attached; the spool keeps all."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "no such file"))
    line = open_line(collector="https://127.0.0.1:9")
    line.put(0, 1)
    line.close()
    assert line.spool.pending() == 2
    assert "the sender stopped; batches stay in" in caplog.text


def test_the_thread_ends(peer: Any, open_line: Opener) -> None:
    """After closing no thread of the sender is left."""
    peer.start()
    open_line().close()
    assert "fp8scope-send" not in {thread.name for thread in threading.enumerate()}
