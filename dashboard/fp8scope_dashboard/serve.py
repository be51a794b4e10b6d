"""`python -m fp8scope_dashboard.serve`: the dashboard on its port."""

import socket
import sys

import uvicorn

from fp8scope_dashboard.settings import Settings, settings_from
from fp8scope_protocol.access import token_path
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Fp8scopeError


def main(argv: list[str]) -> int:
    """0 after a regular end, 2 when the dashboard cannot start, with one line that says why."""
    parser = Parser(prog="python -m fp8scope_dashboard.serve", description=__doc__)
    parser.add_argument("--host", help="address to listen on (FP8SCOPE_DASHBOARD_HOST, 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (FP8SCOPE_DASHBOARD_PORT, 8051)")
    parser.add_argument("--collector", help="address of the collector (FP8SCOPE_COLLECTOR)")
    try:
        options = parser.parse_args(argv)
        settings = settings_from(host=options.host, port=options.port, collector=options.collector)
        listener = _listen(settings)
    except (Fp8scopeError, OSError) as error:
        print(f"fp8scope dashboard: {error}", file=sys.stderr)
        return 2
    from fp8scope_dashboard.app import create_app  # after the port: importing Dash takes a second

    port = listener.getsockname()[1]
    print(f"dashboard  {login_address(settings, port, with_token=sys.stdout.isatty())}", flush=True)
    config = uvicorn.Config(create_app(settings), log_level="warning", access_log=False,
                            ws="websockets-sansio", timeout_graceful_shutdown=3)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def login_address(settings: Settings, port: int, *, with_token: bool) -> str:
    """Where a person logs in. The token only goes to a terminal, never into a log file."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/login"
    return f"{address}#{settings.token}" if with_token else f"{address} (token: {token_path()})"


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise Fp8scopeError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); end the other process or "
            "name another port with --port or FP8SCOPE_DASHBOARD_PORT") from None
    listener.set_inheritable(True)
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
