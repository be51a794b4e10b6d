"""A small HTTP server that speaks the collector's ingest API by a script; run as its own process.

    python peer.py FOLDER PORT

FOLDER/script.json holds a list of answers to the first batches, in order; after them every batch is
stored. An answer is {"status": 503, "headers": {...}, "body": {...}}, or {"drop": "after"} to store the batch
and close the connection without a word. FOLDER/commands.json, when it is there, is what a poll gets.
`switch_over` in FOLDER/rule.json makes the peer issue one command when a stored amax is over it.
Each request is one line of FOLDER/journal; stored batches are files FOLDER/ATTEMPT-PRODUCER-SEQ.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fp8scope_protocol.series import decode_layout
from fp8scope_protocol.wire import decode_batch, decode_hello

FOLDER = Path(sys.argv[1])
LOCK = threading.Lock()
ATTEMPTS: set[str] = set()
LAYOUTS: set[str] = set()


def load(name: str) -> list[dict[str, object]]:
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else []


SCRIPT = load("script.json")


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
            layout = decode_layout(self.body())
            assert urlsplit(self.path).path.endswith(layout.id)
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
                self.batch(body)

    def batch(self, body: bytes) -> None:
        header = decode_batch(body).header
        scripted = SCRIPT.pop(0) if SCRIPT else {}
        path = FOLDER / f"{header.attempt}-{header.producer}-{header.seq}"
        if status := scripted.get("status"):
            assert isinstance(status, int)
            self.note(seq=header.seq, status=status)
            headers = scripted.get("headers")
            self.answer(status, scripted.get("body", {}), headers if isinstance(headers, dict) else None)
        elif header.attempt not in ATTEMPTS:
            self.note(seq=header.seq, status=409, missing="attempt")
            self.answer(409, {"missing": "attempt"})
        elif header.layout is not None and header.layout not in LAYOUTS:
            self.note(seq=header.seq, status=409, missing="layout")
            self.answer(409, {"missing": "layout"})
        else:
            duplicate = path.exists()
            path.write_bytes(body)
            self.note(seq=header.seq, status=200, duplicate=duplicate, attempt=header.attempt)
            self.judge(body)
            if scripted.get("drop"):
                self.close_connection = True
                return
            highest = max([0, *(int(str(command["id"])) for command in load("commands.json"))])
            run = unquote(self.path.split("/")[4])
            reply = {"acked_seq": header.seq, "run": run, "duplicate": duplicate, "commands": highest}
            self.answer(200, reply)

    def judge(self, body: bytes) -> None:
        """One rule, as simple as can be: amax over a limit -> that layer to bf16, once."""
        rules, batch = load("rule.json"), decode_batch(body)
        if not rules or (FOLDER / "commands.json").exists() or "amax" not in batch.arrays:
            return
        limit, module = rules[0]["switch_over"], rules[0]["module"]
        if float(batch.arrays["amax"].max()) > float(str(limit)):
            action = {"kind": "set_precision", "modules": [module], "precision": "bf16"}
            command = {"id": 1, "action": action, "issued_by": "rule:amax"}
            (FOLDER / "commands.json").write_text(json.dumps([command]))


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Peer).serve_forever()
