"""Colours of heat maps: one palette of 8-bit indices, in a dark and a light theme.

Indices are ordered by what a reader must not miss, so that the largest index of several cells is the one
to show when they share a pixel:

    missing < bf16 < scale (240 colours, low to high) < saturated < inf < nan

A layer in BF16 has a colour of its own, yet it never covers a measured FP8 value that shares its pixel:
an overview hides no spike.

The scale runs from blue over grey to yellow on dark pages and from cream over grey to blue on light ones,
evenly in lightness, so that a healthy run is calm and the high end stands out from the page. The other
colours were searched for the largest distance to the scale and to each other with normal sight,
deuteranopia, protanopia and tritanopia (CIE Lab distance over 25).
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fp8scope_protocol.errors import Invalid

Theme = Literal["dark", "light"]
THEMES: tuple[str, ...] = get_args(Theme)

MISSING = 0
BF16 = 1
SCALE_FIRST = 2
SCALE_COLOURS = 240
SCALE_LAST = SCALE_FIRST + SCALE_COLOURS - 1
SATURATED = SCALE_LAST + 1
INF = SATURATED + 1
NAN = INF + 1

NAMES = {"missing": MISSING, "bf16": BF16, "saturated": SATURATED, "inf": INF, "nan": NAN}

_ANCHORS = {
    "dark": (
        "00204c", "00346e", "3c4a6b", "5b5f6d", "757575", "928c78", "b0a572", "d1bf66", "f3db4f", "ffe945",
    ),
    "light": (
        "e6dcae", "d8cc9d", "c0b68e", "a39f86", "868880", "6c7580", "4e6080", "334d7c", "163a70", "00204c",
    ),
}
_RESERVED = {
    "dark": {"missing": "14171c", "bf16": "12b7d3", "saturated": "a313df", "inf": "ffffff", "nan": "ca2900"},
    "light": {"missing": "f2f4f7", "bf16": "289edc", "saturated": "a41bf9", "inf": "000000", "nan": "c92d09"},
}


def palette(theme: str) -> npt.NDArray[np.uint8]:
    """The colours of all 256 indices: [256, 3] of red, green, blue. Unused indices are black."""
    if theme not in THEMES:
        raise Invalid("theme", theme, f"must be one of {', '.join(THEMES)}")
    colours = np.zeros((256, 3), dtype=np.uint8)
    colours[SCALE_FIRST:SCALE_LAST + 1] = _scale(theme)
    for name, index in NAMES.items():
        colours[index] = _rgb(_RESERVED[theme][name])
    return colours


def legend(theme: str) -> dict[str, str]:
    """#rrggbb of every index that is no value, by name."""
    colours = palette(theme)
    return {name: _hex(colours[index]) for name, index in NAMES.items()}


def stops(theme: str, count: int = 16) -> list[str]:
    """`count` colours of the scale from low to high, as #rrggbb."""
    colours = palette(theme)
    return [_hex(colours[round(i)]) for i in np.linspace(SCALE_FIRST, SCALE_LAST, count)]


def _scale(theme: str) -> npt.NDArray[np.uint8]:
    anchors = np.array([_rgb(colour) for colour in _ANCHORS[theme]], dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, SCALE_COLOURS)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour))


def _hex(rgb: npt.NDArray[np.uint8]) -> str:
    return "#" + rgb.tobytes().hex()
