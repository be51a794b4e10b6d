"""A small forward proxy for HTTP; run as its own process: python proxy.py LOG PORT [OWN PORT]

Every request goes to 127.0.0.1:PORT, whatever host it names, and is one line of LOG; where nobody answers
there, it answers 502 itself. The proxy's own port is the first line of its output.
"""

import sys
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LOG, PORT = sys.argv[1], int(sys.argv[2])


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def forward(self) -> None:
        with open(LOG, "a") as file:
            file.write(self.path + "\n")
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        target = HTTPConnection("127.0.0.1", PORT)
        path = f"{address.path}?{address.query}" if address.query else address.path
        try:
            target.request(self.command, path, body, dict(self.headers))
            answer = target.getresponse()
            status, data = answer.status, answer.read()
        except (OSError, HTTPException):
            status, data = 502, b"<html>Bad Gateway</html>"
        target.close()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = forward


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 0), Proxy)
    print(server.server_port, flush=True)
    server.serve_forever()
