"""The console script: one table, each command imported when it is called."""

import sys
from importlib import import_module

from fp8scope_protocol.errors import Fp8scopeError

COMMANDS: dict[str, tuple[str, str, str]] = {
    # command: (module with main(argv) -> int, extra that it needs, what it does)
    "demo": ("fp8scope_server.demo", "all", "train a small model in FP8, break it, watch it being saved"),
    "up": ("fp8scope_server.up", "all", "start the collector and the dashboard"),
    "sync": ("fp8scope.sync", "all", "bring what offline jobs spooled to the collector"),
    "doctor": ("fp8scope.doctor", "all", "tell what a probe would measure of your model, and its cost"),
    "train": ("fp8scope_trainer.train", "trainer", "train the reference decoder with the probe attached"),
    "convert-checkpoint": ("fp8scope_trainer.conversion_command", "trainer",
                           "write a checkpoint with its optimizer states in another format"),
    "proxy": ("fp8scope_trainer.proxy", "trainer", "compare the loss of formats on a small model"),
    "estimate": ("fp8scope_trainer.estimate_command", "trainer", "tell what memory of a GPU a job fills"),
}

USAGE_ERROR = 2
"""Exit code of bad input, as in argparse."""


def main(argv: list[str] | None = None) -> int:
    """Run `fp8scope COMMAND ...`; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"fp8scope {version('fp8scope')}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        print(f"fp8scope: unknown command {command!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE_ERROR
    module, extra, _ = COMMANDS[command]
    try:
        entry = import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fp8scope"):
            raise
        print(f"fp8scope {command}: {error.name} is not installed; pip install 'fp8scope[{extra}]'",
              file=sys.stderr)
        return USAGE_ERROR
    try:
        return int(entry.main(rest))
    except Fp8scopeError as error:
        print(f"fp8scope {command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    lines = [f"  {name:<18} {what}" for name, (_, _, what) in COMMANDS.items()]
    return "\n".join(["usage: fp8scope COMMAND ...", "", *lines, "", "fp8scope COMMAND --help tells more."])


if __name__ == "__main__":
    sys.exit(main())
