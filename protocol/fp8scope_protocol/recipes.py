"""What-ifs as a person names them: `int8`, or `int8/tile 1x128` where the usual scaling is not meant.

A format has a usual scaling for every role, that of the recipes in use. FP8: [1,128] tiles, [128,128] blocks
of weights (DeepSeek-V3). INT8: a scale a row, which integer GEMMs can take out of the sum. INT4: tiles, since
15 codes span little. Optimizer states in INT8: groups of 256 of the flattened state, the block size of 8-bit
optimizers (bitsandbytes, torchao): states have no rows that a GEMM would care for, and a wide row loses more.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import Format, check_pair, parse_format, parse_scaling

STATES = ("exp_avg", "exp_avg_sq", "momentum")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A format and how tensors are scaled into it; `scaling` "" takes the usual one of each role."""

    element: Format
    scaling: str = ""

    def scaling_of(self, role: str) -> str:
        """The scaling of tensors of `role`."""
        return self.scaling or usual_scaling(self.element, role)


def usual_scaling(element: Format, role: str) -> str:
    """How tensors of `role` are scaled where nobody says otherwise."""
    if element.name == "bf16":
        return "none"
    if element.name == "mxfp8":
        return "mx 1x32 rceil"
    if element.name == "int4":
        return "tile 1x128"
    if element.name == "int8":
        return "flat 256" if role in STATES else "rowwise"
    return "block 128x128" if role == "weight" else "tile 1x128"


def parse_recipe(name: str) -> Recipe:
    """The recipe called `format` or `format/scaling`; `Invalid` where there is none, naming near misses."""
    format_name, slash, scaling = name.partition("/")
    element = parse_format(format_name)
    if element.stored_only:
        raise Invalid("formats", name, "is read where an optimizer has stored it, not offered as a what-if")
    if slash:
        check_pair(element, parse_scaling(scaling))
    return Recipe(element=element, scaling=scaling)


def parse_recipes(names: Iterable[str]) -> tuple[Recipe, ...]:
    """The recipes called `names`, each once."""
    return tuple(parse_recipe(name) for name in dict.fromkeys(names))


def what_ifs(recipes: Iterable[Recipe], role: str) -> tuple[tuple[Format, str], ...]:
    """What tensors of `role` are measured in, (format, scaling): each pair once, whoever asks for it."""
    return tuple(dict.fromkeys((one.element, one.scaling_of(role)) for one in recipes))
