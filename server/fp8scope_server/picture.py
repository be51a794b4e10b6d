"""A heat map as a palette PNG at screen resolution.

[steps, series] of palette indices -> [height, width] pixels -> PNG. Where several cells share a pixel the
largest index wins (palette.py orders them), so a single NaN or spike among 100,000 steps stays visible.
The server renders because 500 x 1000 floats cost a browser 359 ms an update and this picture 14 ms.
"""

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from fp8scope_protocol.errors import Invalid
from fp8scope_server.palette import MISSING, palette

Indices = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

MAX_EDGE = 4096
"""Largest width and height, in pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """Pixels of a picture over the steps `first` to `last`, both included."""

    width: int
    height: int
    first: int
    last: int

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            if not 1 <= getattr(self, name) <= MAX_EDGE:
                raise Invalid(name, getattr(self, name), f"must be 1 to {MAX_EDGE} pixels")
        if not 0 <= self.first <= self.last:
            raise Invalid("first, last", (self.first, self.last), "needs 0 <= first <= last")


def draw(cells: Indices, steps: Ints, canvas: Canvas, *, hold: int) -> Indices:
    """Pixels [height, width] of `cells` [steps, series], sampled at the ascending `steps`.

    A sample is drawn until the next one, over `hold` steps at most: a longer pause is a gap in the
    data and shows as missing.
    """
    if not cells.size:
        return np.full((canvas.height, canvas.width), MISSING, dtype=np.uint8)
    columns = _over_steps(cells, steps, canvas, hold)
    return np.ascontiguousarray(_over_series(columns, canvas.height).T)


def encode_png(pixels: Indices, theme: str) -> bytes:
    """`pixels` [height, width] of palette indices as a PNG in mode P."""
    height, width = pixels.shape
    image = Image.frombytes("P", (width, height), pixels.tobytes())
    image.putpalette(palette(theme).tobytes(), "RGB")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _over_steps(cells: Indices, steps: Ints, canvas: Canvas, hold: int) -> Indices:
    """Cells [steps, series] -> [width, series]."""
    width, span = canvas.width, canvas.last + 1 - canvas.first
    edges = canvas.first * width + np.arange(width + 1) * span  # in 1/width steps: exact in integers
    ends = np.minimum(np.append(steps[1:], steps[-1] + hold), steps + hold)
    start = np.searchsorted(ends * width, edges[:-1], side="right")
    stop = np.searchsorted(steps * width, edges[1:], side="left")
    return _largest(cells, start, stop)


def _over_series(columns: Indices, height: int) -> Indices:
    """Columns [width, series] -> [width, height]; pixel row y begins at series y * series // height."""
    rows = columns.shape[1]
    start = np.arange(height) * rows // height
    if rows <= height:
        return columns[:, start]
    return _largest(columns.T, start, np.append(start[1:], rows)).T


def _largest(cells: Indices, start: Ints, stop: Ints) -> Indices:
    """result[i] = largest of cells[start[i]:stop[i]] along the first axis; MISSING where that is empty."""
    padding = np.full((1, cells.shape[1]), MISSING, dtype=np.uint8)
    padded = np.concatenate([cells, padding])
    bounds = np.stack([start, np.maximum(stop, start)], axis=1).reshape(-1)
    result: Indices = np.maximum.reduceat(padded, bounds, axis=0)[::2]
    result[stop <= start] = MISSING
    return result
