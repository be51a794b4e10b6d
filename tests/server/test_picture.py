"""Heat map pictures: exact pixels, and nothing bad lost where cells share a pixel."""

import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fp8scope_protocol.errors import Invalid
from fp8scope_server.palette import BF16, MISSING, NAN, SCALE_FIRST, SCALE_LAST, palette
from fp8scope_server.picture import Canvas, draw, encode_png

LOW, HIGH = SCALE_FIRST, SCALE_LAST


def cells(rows: list[list[int]]) -> npt.NDArray[np.uint8]:
    """[steps, series] from one list per series, as one reads a picture."""
    return np.array(rows, dtype=np.uint8).T


def at(*steps: int) -> npt.NDArray[np.int64]:
    return np.array(steps, dtype=np.int64)


def test_each_cell_becomes_a_block_of_pixels() -> None:
    """2 series x 2 samples on 4 x 4 pixels: quarters, upper row first."""
    pixels = draw(cells([[10, 20], [30, 40]]), at(0, 1), Canvas(width=4, height=4, first=0, last=1), hold=1)
    assert pixels.tolist() == [[10, 10, 20, 20], [10, 10, 20, 20], [30, 30, 40, 40], [30, 30, 40, 40]]


def test_a_sample_is_drawn_until_the_next_one() -> None:
    """Sampled every 10th step, one pixel a step: ten pixels each, the last one cut by the window."""
    pixels = draw(cells([[10, 20, 30]]), at(0, 10, 20), Canvas(width=25, height=1, first=0, last=24), hold=10)
    assert pixels.tolist() == [[10] * 10 + [20] * 10 + [30] * 5]


def test_a_gap_in_the_data_is_missing() -> None:
    """Steps 10 and 20 were lost: the sample at 0 does not stand for them."""
    pixels = draw(cells([[10, 20]]), at(0, 30), Canvas(width=8, height=1, first=0, last=39), hold=10)
    assert pixels.tolist() == [[10, 10, MISSING, MISSING, MISSING, MISSING, 20, 20]]


def test_window_before_and_after_the_data_is_missing() -> None:
    pixels = draw(cells([[10]]), at(5), Canvas(width=10, height=1, first=0, last=9), hold=1)
    assert pixels.tolist() == [[MISSING] * 5 + [10] + [MISSING] * 4]


def test_one_nan_among_100_000_steps_survives() -> None:
    """Columns reduce to the worst cell."""
    matrix = np.full((100_000, 3), LOW, dtype=np.uint8)
    matrix[77_777, 1] = NAN
    steps = np.arange(100_000)
    pixels = draw(matrix, steps, Canvas(width=500, height=3, first=0, last=99_999), hold=1)
    assert pixels[1, 77_777 * 500 // 100_000] == NAN
    assert (pixels == NAN).sum() == 1
    assert (pixels[[0, 2]] == LOW).all()


def test_a_spike_in_one_of_3000_series_survives() -> None:
    """Rows reduce to the worst cell, in the pixel row that the row mapping names."""
    matrix = np.full((4, 3000), LOW, dtype=np.uint8)
    matrix[2, 1234] = HIGH
    pixels = draw(matrix, np.arange(4), Canvas(width=4, height=700, first=0, last=3), hold=1)
    rows, columns = np.nonzero(pixels == HIGH)
    assert columns.tolist() == [2]
    assert [y * 3000 // 700 for y in rows] == [1234]


def test_bf16_shows_alone_but_never_covers_a_spike() -> None:
    """BF16 has its own colour; where it shares a pixel with a measured FP8 value, the value is shown."""
    canvas = Canvas(width=2, height=1, first=0, last=3)
    assert draw(cells([[BF16, BF16, HIGH, BF16]]), at(0, 1, 2, 3), canvas, hold=1).tolist() == [[BF16, HIGH]]


def test_reduction_equals_a_plain_loop() -> None:
    """Irregular steps, odd sizes: every pixel is the largest cell that overlaps it."""
    random = np.random.default_rng(7)
    steps = np.sort(random.choice(997, size=143, replace=False))
    matrix = random.integers(MISSING, NAN + 1, size=(143, 29)).astype(np.uint8)
    canvas = Canvas(width=61, height=13, first=40, last=960)
    pixels = draw(matrix, steps, canvas, hold=6)
    span = canvas.last + 1 - canvas.first
    for x in range(canvas.width):
        left, right = canvas.first * 61 + x * span, canvas.first * 61 + (x + 1) * span
        ends = [min(int(b), int(a) + 6) for a, b in zip(steps, [*steps[1:], 10_000], strict=True)]
        inside = [i for i in range(143) if steps[i] * 61 < right and ends[i] * 61 > left]
        for y in range(canvas.height):
            series = [j for j in range(29) if y * 29 // 13 <= j < (y + 1) * 29 // 13]
            expected = max((int(matrix[i, j]) for i in inside for j in series), default=MISSING)
            assert pixels[y, x] == expected


def test_nothing_measured_is_a_picture_of_missing() -> None:
    """D5: a run without samples still has a picture."""
    pixels = draw(np.zeros((0, 0), dtype=np.uint8), at(), Canvas(width=3, height=2, first=0, last=0), hold=1)
    assert pixels.tolist() == [[MISSING] * 3] * 2


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_png_has_exactly_the_palette_colours(theme: str) -> None:
    """8-bit mode P; each index decodes to its colour of the theme."""
    pixels = np.arange(NAN + 1, dtype=np.uint8)[None, :]
    image = Image.open(io.BytesIO(encode_png(pixels, theme)))
    assert (image.mode, image.size) == ("P", (NAN + 1, 1))
    assert (np.asarray(image.convert("RGB"))[0] == palette(theme)[:NAN + 1]).all()


def test_canvas_limits_are_named() -> None:
    with pytest.raises(Invalid, match="width = 0: must be 1 to 4096"):
        Canvas(width=0, height=1, first=0, last=0)
    with pytest.raises(Invalid, match="first <= last"):
        Canvas(width=1, height=1, first=5, last=4)
