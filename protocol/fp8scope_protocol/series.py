"""What is measured: series, and the ordered layout in which their numbers travel."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import SCALE_POLICIES, parse_format, parse_scaling

Role = Literal[
    "activation", "weight", "gradient",  # GEMM inputs
    "output", "dgrad", "wgrad",  # GEMM outputs
    "exp_avg", "exp_avg_sq", "momentum", "master_weight",  # optimizer states
]
Orientation = Literal["rowwise", "columnwise"]

ROLES: tuple[str, ...] = get_args(Role)
ORIENTATIONS: tuple[str, ...] = get_args(Orientation)

WRAPPER_PREFIXES = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

NAME_LIMIT = 256
"""Longest name of a series, in characters."""


class Series(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured thing: a tensor's role and orientation in one format and scaling.

    `module` is the layer that a precision switch acts on ("" for what no layer owns); `depth` orders
    rows of the heat map from input to output; `aliases` are further names of a tied tensor.
    """

    name: str
    role: Role
    orientation: Orientation = "rowwise"
    format: str
    scaling: str
    policy: str = "current"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    live: bool = False
    """True when the format is the one the job runs in; False for a what-if."""
    module: str = ""
    depth: int = 0
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= NAME_LIMIT or not self.name.isprintable():
            raise Invalid("name", self.name[:80], f"must be 1 to {NAME_LIMIT} printable characters")
        parse_format(self.format)
        parse_scaling(self.scaling)
        if self.policy not in SCALE_POLICIES:
            raise Invalid("policy", self.policy, f"must be one of {', '.join(SCALE_POLICIES)}")

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What tells two series apart: (name, role, orientation, format, scaling)."""
        return (self.name, self.role, self.orientation, self.format, self.scaling)


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ordered list of series. Column i of every matrix that names this layout is `series[i]`."""

    series: tuple[Series, ...]

    def __post_init__(self) -> None:
        seen: set[tuple[str, ...]] = set()
        for one in self.series:
            if one.key in seen:
                raise Invalid("series", " / ".join(one.key), "must be listed once in a layout")
            seen.add(one.key)

    @property
    def id(self) -> str:
        """First 16 bytes of SHA-256 of the canonical encoding, as 32 hex digits."""
        return layout_id(encode_layout(self))


def encode_layout(layout: Layout) -> bytes:
    """Canonical bytes: msgpack with fields in declaration order."""
    return msgspec.msgpack.encode(layout)


def layout_id(data: bytes) -> str:
    """The id of the layout that `data` encodes."""
    return hashlib.sha256(data).digest()[:16].hex()


def decode_layout(data: bytes) -> Layout:
    """Inverse of `encode_layout`; raises `msgspec.ValidationError` or `Invalid`."""
    return msgspec.msgpack.decode(data, type=Layout)


def canonical_name(qualified: str) -> str:
    """`qualified` without the prefixes that wrappers add, wherever they stand in it.

    >>> canonical_name("_orig_mod.layers.0._fsdp_wrapped_module.w1")
    'layers.0.w1'
    """
    dotted = qualified + "."
    changed = True
    while changed:
        changed = False
        for prefix in WRAPPER_PREFIXES:
            if dotted.startswith(prefix):
                dotted = dotted[len(prefix):]
                changed = True
            inner = "." + prefix
            if prefix != "module." and inner in dotted:
                dotted = dotted.replace(inner, ".")
                changed = True
    return dotted[:-1]


def matching_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that `pattern` selects, in order.

    A pattern is a dotted name whose parts match exactly; `*` stands for one whole part and `**` for any
    number of parts, so `layers.1` never selects `layers.10`.
    """
    wanted = pattern.split(".")
    return [name for name in names if _parts_match(wanted, name.split("."))]


def _parts_match(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Follows all ways at once: a pattern of many `**` has more ways than can be tried one by one."""
    ends = {0}
    for head in pattern:
        if head == "**":
            ends = set(range(min(ends), len(parts) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(parts) and head in ("*", parts[end])}
        if not ends:
            return False
    return len(parts) in ends
