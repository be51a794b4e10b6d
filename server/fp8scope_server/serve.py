"""`python -m fp8scope_server.serve`: the collector, until SIGINT or SIGTERM."""

import asyncio
import logging
import socket
import sys

import uvicorn

from fp8scope_protocol.errors import Fp8scopeError, Invalid
from fp8scope_server.app import create_app
from fp8scope_server.interrupt import raise_on_terminate
from fp8scope_server.settings import ServerSettings


def main() -> int:
    """Serve as the environment says. 0 after a clean stop, 2 when it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_on_terminate()
    try:
        settings = ServerSettings.from_environment()
        with _listen(settings) as listener:
            asyncio.run(_serve(settings, listener))
    except Fp8scopeError as error:
        print(f"fp8scope collector: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


async def _serve(settings: ServerSettings, listener: socket.socket) -> None:
    app = create_app(settings)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off",
                            timeout_graceful_shutdown=5)
    # uvicorn would turn an exception of the lifespan into a log line and exit code 3.
    async with app.router.lifespan_context(app):
        await uvicorn.Server(config).serve([listener])


def _listen(settings: ServerSettings) -> socket.socket:
    """Take the port before anything is started for it."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise Invalid("FP8SCOPE_PORT", settings.port, f"cannot listen on {settings.host} there "
                      f"({error.strerror}); is another collector running? Choose another port") from None
    return listener


if __name__ == "__main__":
    sys.exit(main())
