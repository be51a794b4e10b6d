"""Colours of heat maps: order of indices, themes, distance for colour-blind readers."""

import numpy as np
import numpy.typing as npt
import pytest

from fp8scope_protocol.errors import Invalid
from fp8scope_server import palette as colours
from fp8scope_server.palette import THEMES, legend, palette, stops

SIGHT = {
    "normal": np.eye(3),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}
"""Linear RGB as seen with each kind of sight (Machado, Oliveira and Fernandes, 2009)."""


def lab(rgb: npt.NDArray[np.uint8], sight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """CIE Lab (D65) of [n, 3] sRGB colours as seen with `sight`."""
    share = rgb / 255.0
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ sight.T, 0, 1)
    xyz = seen @ np.array([[0.4124, 0.2126, 0.0193], [0.3576, 0.7152, 0.1192], [0.1805, 0.0722, 0.9505]])
    xyz = xyz / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def test_what_must_not_be_missed_has_the_larger_index() -> None:
    """missing < bf16 < scale < saturated < inf < nan, all within 8 bits."""
    order = [colours.MISSING, colours.BF16, colours.SCALE_FIRST, colours.SCALE_LAST, colours.SATURATED,
             colours.INF, colours.NAN]
    assert order == sorted(set(order))
    assert colours.SCALE_LAST - colours.SCALE_FIRST + 1 == 240
    assert colours.NAN < 256


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", SIGHT)
def test_reserved_colours_are_told_apart_by_colour_blind_readers(theme: str, sight: str) -> None:
    """Reserved colours are at least 25 (CIE Lab) from the scale and from each other; neutrals 10."""
    table = palette(theme)
    names = list(colours.NAMES)
    reserved = lab(table[[colours.NAMES[name] for name in names]], SIGHT[sight])
    scale = lab(table[colours.SCALE_FIRST:colours.SCALE_LAST + 1], SIGHT[sight])
    for i, name in enumerate(names):
        if name not in ("missing", "inf"):  # these two are neutral: only lightness tells them from the scale
            assert np.linalg.norm(scale - reserved[i], axis=1).min() > 25, name
        assert np.linalg.norm(scale - reserved[i], axis=1).min() > 10, name
        for j in range(i):
            assert np.linalg.norm(reserved[i] - reserved[j]) > 25, (name, names[j])


def test_scale_grows_in_lightness_on_dark_and_falls_on_light() -> None:
    """The high end stands out from the page in both themes, without a step back on the way."""
    def lightness(theme: str) -> npt.NDArray[np.float64]:
        return lab(palette(theme)[colours.SCALE_FIRST:colours.SCALE_LAST + 1], SIGHT["normal"])[:, 0]

    assert (np.diff(lightness("dark")) > -0.4).all()  # rounding to 8 bits
    assert (np.diff(lightness("light")) < 0.4).all()
    assert lightness("dark")[-1] - lightness("dark")[0] > 70


def test_legend_and_stops_are_the_palette() -> None:
    """The page's legend shows the picture's very colours."""
    table = palette("dark")
    assert legend("dark")["nan"] == "#" + bytes(table[colours.NAN]).hex()
    shown = stops("dark", 5)
    assert len(shown) == 5
    assert shown[0] == "#" + bytes(table[colours.SCALE_FIRST]).hex()
    assert shown[-1] == "#" + bytes(table[colours.SCALE_LAST]).hex()


def test_unknown_theme_is_named() -> None:
    with pytest.raises(Invalid, match=r"'sepia'.*dark, light"):
        palette("sepia")
