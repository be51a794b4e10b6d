"""`fp8scope convert-checkpoint`: optimizer states in another format, or from and to plain torch."""

import sys
from dataclasses import dataclass

from fp8scope_protocol.command_line import Parser
from fp8scope_trainer.state_block import FORMATS
from fp8scope_trainer.state_conversion import KINDS, convert_states


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionOptions:
    """One conversion."""

    source: str
    target: str
    states: str
    block: int | None
    kind: str


def main(argv: list[str] | None = None) -> int:
    """Entry of `fp8scope convert-checkpoint`; bad input is raised as one line of `Fp8scopeError`."""
    options = parse(sys.argv[1:] if argv is None else argv)
    path = convert_states(options.source, options.target, states=options.states, block=options.block,
                          kind=options.kind)
    print(path)
    return 0


def parse(argv: list[str]) -> ConversionOptions:
    """`argv` without the command's name."""
    given = _parser().parse_args(argv)
    return ConversionOptions(source=given.source, target=given.target, states=given.states,
                             block=given.block, kind=given.kind)


def _parser() -> Parser:
    parser = Parser(prog="fp8scope convert-checkpoint",
                    description="Write a checkpoint with its optimizer states in another format.")
    parser.add_argument("source", metavar="FROM",
                        help="a folder of checkpoints, one of them, or a DCP folder or a file of torch.save "
                             "with model and optimizer of a plain torch.optim.AdamW")
    parser.add_argument("target", metavar="TO", help="a folder of checkpoints; a new path with --kind")
    parser.add_argument("--states", default="fp32", choices=FORMATS, help="format of the moments (fp32)")
    parser.add_argument("--block", type=int, help="elements that share a scale (the format's)")
    parser.add_argument("--kind", default="fp8scope", choices=KINDS,
                        help="how to store it; dcp and torch for a plain torch.optim.AdamW (fp8scope)")
    return parser
