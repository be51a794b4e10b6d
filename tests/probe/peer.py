"""A small HTTP server that speaks the collector's ingest API by a script; run as its own process.

    python peer.py FOLDER PORT

FOLDER/script.json holds a list of answers to the first requests with batches, in order; after them every
batch is stored. An answer is {"status": 503, "headers": {...}, "body": {...}}, or {"drop": "after"} to store
the batch and close the connection without a word. FOLDER/rules.json, while it is there, may hold {"always":
{...}} to answer every such request so, {"most_bytes": n} for a 413 to larger bodies, {"never": [seq, ...]}
for a 422 to these batches, and {"seconds": s} to take that long over each. FOLDER/commands.json, when it is
there, is what a poll gets. `switch_over` in FOLDER/rule.json makes the peer issue one command when a stored
amax is over it. While FOLDER/alert exists, answers tell of an alert.
Each request is one line of FOLDER/journal; stored batches are files FOLDER/ATTEMPT-PRODUCER-SEQ.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from fp8scope_protocol.bundle import decode_body
from fp8scope_protocol.series import decode_layout
from fp8scope_protocol.wire import Batch, decode_batch, decode_hello, encode_batch

FOLDER = Path(sys.argv[1])
LOCK = threading.Lock()
ATTEMPTS: set[str] = set()
LAYOUTS: set[str] = set()


PARTS: dict[tuple[str, ...], dict[int, bytes]] = {}


def load(name: str) -> Any:
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else []


def noted() -> set[tuple[str, str, int]]:
    """The batches whose line is in the journal. One that was written when the peer was killed before its line
    was is stored once more, as by a collector whose transaction did not end."""
    path = FOLDER / "journal"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(one["attempt"], one["producer"], one["seq"]) for one in lines if one.get("status") == 200}


SCRIPT: list[dict[str, Any]] = load("script.json")
STORED = noted()


class Peer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer; head and body apart would wait 40 ms for each other

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def note(self, **facts: object) -> None:
        with (FOLDER / "journal").open("a") as file:
            file.write(json.dumps({"method": self.command, "path": self.path, **facts}) + "\n")

    def answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def do_GET(self) -> None:
        with LOCK:
            commands = load("commands.json")
            self.note(commands=len(commands))
            self.answer(200, commands)

    def do_PUT(self) -> None:
        with LOCK:
            address = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(address.query).items()}
            if address.path.endswith("/parts"):
                self.part(self.body(), query)
            elif address.path.endswith("/lost"):
                lost = json.loads(self.body())
                self.note(lost=lost, attempt=query["attempt"])
                self.answer(200, {})
            else:
                layout = decode_layout(self.body())
                assert address.path.endswith(layout.id)
                LAYOUTS.add(layout.id)
                self.note(layout=layout.id)
                self.answer(200, {})

    def do_POST(self) -> None:
        with LOCK:
            body = self.body()
            if self.path.endswith("/attempts"):
                hello = decode_hello(body)
                ATTEMPTS.add(hello.attempt)
                self.note(attempt=hello.attempt, token=self.headers["authorization"])
                self.answer(200, {})
            else:
                self.batches(decode_body(body), len(body))

    def part(self, body: bytes, query: dict[str, str]) -> None:
        key = tuple(query[name] for name in ("attempt", "producer", "seq", "count"))
        parts = PARTS.setdefault(key, {})
        parts[int(query["index"])] = body
        if len(parts) == int(query["count"]):
            self.batches([decode_batch(b"".join(parts[i] for i in sorted(parts)))], len(body))
        elif not self.refused(len(body), int(query["seq"])):
            self.note(seq=int(query["seq"]), part=int(query["index"]), status=202)
            self.answer(202, {})

    def refused(self, size: int, *seqs: int) -> dict[str, Any] | None:
        """What the script says to this request: answers it if that is a status."""
        rules: dict[str, Any] = load("rules.json") or {}
        time.sleep(rules.get("seconds", 0))
        scripted: dict[str, Any] = SCRIPT.pop(0) if SCRIPT else rules.get("always", {})
        if size > rules.get("most_bytes", size):
            scripted = {"status": 413}
        if set(seqs) & set(rules.get("never", [])):
            scripted = {"status": 422}
        if status := scripted.get("status"):
            self.note(seq=seqs[0], status=status, size=size)
            self.answer(status, scripted.get("body", {}), scripted.get("headers"))
        return scripted or None

    def batches(self, batches: list[Batch], size: int) -> None:
        first = batches[0].header
        scripted = self.refused(size, *(batch.header.seq for batch in batches)) or {}
        if scripted.get("status"):
            return
        missing = "attempt" if first.attempt not in ATTEMPTS else ""
        if not missing and any(one.header.layout not in {None, *LAYOUTS} for one in batches):
            missing = "layout"
        if missing:
            self.note(seq=first.seq, status=409, missing=missing)
            self.answer(409, {"missing": missing})
            return
        duplicates = [self.store(batch, len(batches)) for batch in batches]
        if scripted.get("drop"):
            self.close_connection = True
            return
        highest = max([0, *(int(str(command["id"])) for command in load("commands.json"))])
        run = unquote(self.path.split("/")[4])
        self.answer(200, {"acked_seq": batches[-1].header.seq, "run": run, "duplicate": all(duplicates),
                          "commands": highest, "alert": (FOLDER / "alert").exists()})

    def store(self, batch: Batch, together: int) -> bool:
        header = batch.header
        key = header.attempt, header.producer, header.seq
        (FOLDER / "-".join(map(str, key))).write_bytes(encode_batch(batch))
        duplicate = key in STORED
        self.note(seq=header.seq, status=200, duplicate=duplicate, attempt=header.attempt,
                  producer=header.producer, together=together, lost=header.lost)
        STORED.add(key)
        self.judge(batch)
        return duplicate

    def judge(self, batch: Batch) -> None:
        """One rule, as simple as can be: amax over a limit -> that layer to bf16, once."""
        rules = load("rule.json")
        if not rules or (FOLDER / "commands.json").exists() or "amax" not in batch.arrays:
            return
        limit, module = rules[0]["switch_over"], rules[0]["module"]
        if float(batch.arrays["amax"].max()) > float(str(limit)):
            action = {"kind": "set_precision", "modules": [module], "precision": "bf16"}
            command = {"id": 1, "action": action, "issued_by": "rule:amax"}
            (FOLDER / "commands.json").write_text(json.dumps([command]))


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Peer).serve_forever()
