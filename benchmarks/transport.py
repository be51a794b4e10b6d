"""Whether the sender keeps up: a step every 20 ms against a collector that takes 50 ms for each answer.

    python benchmarks/transport.py [--quick] [--json]

The same steps once with one batch a request and once as the sender does it. Behind: batches in the spool that
are not acknowledged yet. The collector is a server in a process of its own that stores nothing.
"""

import argparse
import json
import multiprocessing
import platform
import tempfile
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fp8scope import line
from fp8scope.segment import spool_folder
from fp8scope.sender import Sender
from fp8scope.settings import ProbeSettings
from fp8scope.spool import Spool
from fp8scope_protocol.wire import Batch, BatchHeader, Hello, encode_batch, encode_hello, planes_of

STEP_SECONDS = 0.02
ANSWER_SECONDS = 0.05
SERIES, METRICS = 400, 20


class Slow(BaseHTTPRequestHandler):
    """Acknowledges everything, late."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(ANSWER_SECONDS)
        body = b'{"acked_seq": 0, "run": "r"}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(port: Connection) -> None:
    """Send the port, then serve one connection after the other."""
    server = HTTPServer(("127.0.0.1", 0), Slow)
    port.send(server.server_port)
    server.serve_forever()


def measure(steps: int, most_batches: int) -> dict[str, Any]:
    """Spools `steps` batches of 400 series x 20 metrics, a step time apart; how far behind the sender was."""
    line.MOST_BATCHES = most_batches
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    address = f"http://127.0.0.1:{ours.recv()}"
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {f"m{i}": rng.normal(size=SERIES).astype("<f4") for i in range(METRICS)}
    behind = []
    with tempfile.TemporaryDirectory() as folder:
        settings = ProbeSettings(collector=address, spool=Path(folder))
        spool = Spool(spool_folder(Path(folder), "r", "a", "all"), limit=2**30, memory_limit=0,
                      hello=encode_hello(Hello(run="r", attempt="a", producer="all")))
        sender = Sender(spool, settings=settings, run="r", token=None, inbox=None, lost=Counter())
        start = time.perf_counter()
        for step in range(steps):
            header = BatchHeader(run="r", attempt="a", producer="all", seq=step, step=step, layout="l",
                                 columns=SERIES, planes=planes_of(arrays))
            spool.append(step, encode_batch(Batch(header=header, arrays=arrays)), ("l", b""))
            sender.wake()
            behind.append(spool.pending())
            time.sleep(max(0.0, start + (step + 1) * STEP_SECONDS - time.perf_counter()))
        end = spool.pending()
        sender.close(600.0)
        spool.close()
    server.terminate()
    server.join()
    return {"most_batches": most_batches, "steps": steps, "behind_most": max(behind), "behind_at_end": end}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 s of steps instead of 60")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    options = parser.parse_args()
    steps = 500 if options.quick else 3000
    results = [measure(steps, most) for most in (1, line.MOST_BATCHES)]
    print(f"{'batches a request':>18} {'steps':>6} {'most behind':>12} {'behind at the end':>18}")
    for one in results:
        print(f"{one['most_batches']:>18} {steps:>6} {one['behind_most']:>12} {one['behind_at_end']:>18}")
    if options.json:
        print(json.dumps({"benchmark": "transport", "machine": platform.processor() or platform.machine(),
                          "results": results}))


if __name__ == "__main__":
    main()
