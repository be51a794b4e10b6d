"""The parser of a command's line: what cannot be read is one line, like every other bad value."""

import argparse
import re
from typing import NoReturn

from fp8scope_protocol.errors import Invalid


class Parser(argparse.ArgumentParser):
    """Raises `Invalid` instead of printing its usage and leaving; no option may be abbreviated.

    prog: the command as it is typed. description: what it does.
    """

    def __init__(self, *, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Says which option, which value and what it must be, where argparse tells."""
        see = f"see {self.prog} --help"
        wrong = re.fullmatch(r"argument (\S+): invalid (\w+) value: (['\"])(.*)\3", message, re.DOTALL)
        if wrong is None:
            raise Invalid("command line", " ".join(message.split()), see)
        option, kind, _, value = wrong.groups()
        raise Invalid(option, value, f"must be {_KINDS.get(kind, kind)}; {see}")


_KINDS = {"int": "a whole number", "float": "a number", "_budget": "a share of the time, or none"}
