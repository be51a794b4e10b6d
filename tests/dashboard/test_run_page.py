"""The run page in a real browser, on a real collector, with a job that answers like a probe."""

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.wire import ProbeEvent

pytestmark = pytest.mark.browser

COLOURS = """async () => {
    const image = document.querySelector('.picture');
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return {width: image.naturalWidth, colours: new Set(pixels).size};
}"""

Service = Any
Job = Any


def open_run(page: Page, dashboard: Service, run: str, query: str = "") -> None:
    page.goto(f"{dashboard.url}/runs/{run}{query}")
    page.wait_for_selector(".picture[src]", state="attached")


def point_at(page: Page, step: int, steps: int, row: int, rows: int) -> None:
    box = page.locator(".view").bounding_box()
    assert box is not None
    x, y = (step + 0.5) / steps, (row + 0.5) / rows
    page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)


def test_the_picture_and_the_exact_values_under_the_pointer(
    page: Page, dashboard: Service, job: Callable[..., Job]
) -> None:
    """The heat map is loaded and has several colours; the pointer shows the stored value, to the bit."""
    one = job(modules=tuple(f"layers.{i}" for i in range(6))).start()
    for step in range(20):
        one.send(step, one.wave(step), loss=3.0 - step / 10)
    open_run(page, dashboard, one.run)
    seen = page.evaluate(COLOURS)
    assert seen["width"] > 0
    assert seen["colours"] >= 6
    point_at(page, step=7, steps=20, row=2, rows=6)
    shown = page.locator(".tip [data-metric=underflow_ratio]")
    expect(shown).to_be_visible()
    stored = one.wave(7)[[s.role == "activation" for s in one.layout.series]][2]
    assert np.float32(shown.get_attribute("data-value") or "nan") == stored
    expect(page.locator(".tip-name")).to_have_text("layers.2")
    expect(page.locator(".tip-step")).to_contain_text("step 7")
    expect(page.locator(".loss-line")).to_have_attribute("d", re.compile(r"^M[\d. ]+(L[\d. ]+){5,}"))
    expect(page.locator("#summary")).not_to_be_empty()


def test_nan_is_spelled_out(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """A NaN of the job is "NaN" in the tooltip, and what was not measured says so."""
    one = job().start()
    values = one.wave(0)
    values[0] = np.nan
    one.send(0, values, loss=float("nan"))
    open_run(page, dashboard, one.run)
    point_at(page, step=0, steps=1, row=0, rows=2)
    expect(page.locator(".tip [data-metric=underflow_ratio]")).to_have_text("NaN")
    expect(page.locator(".tip [data-metric=nan_count]")).to_have_text("3")
    expect(page.locator(".strip")).to_contain_text("loss is NaN")


def test_the_worst_tensors_name_their_rank(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """A column of ranks where ranks were merged, and none elsewhere; the exact value is under the pointer."""
    alone, merged = job().start(), job().start()
    alone.send(0, alone.wave(0))
    merged.send(0, merged.wave(0), ranks=np.array([3, 0, 0, 11, 0, 0]))
    open_run(page, dashboard, alone.run)
    expect(page.locator("#worst thead")).to_contain_text("Limit")
    expect(page.locator("#worst thead")).not_to_contain_text("Worst rank")
    open_run(page, dashboard, merged.run)
    expect(page.locator("#worst thead")).to_contain_text("Worst rank")
    assert page.locator("#worst tbody tr td:last-child").all_inner_texts() == ["11", "3"]
    point_at(page, step=0, steps=1, row=0, rows=2)
    expect(page.locator(".tip [data-metric=worst_rank]")).to_have_text("3")


def test_the_probe_tells_of_itself(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """Its overhead as a line and in words, each change of its cadence, a clock that is off, what was lost."""
    one = job().start()
    for step in range(0, 40, 4):
        cadence = ProbeEvent(kind="cadence", step=16, text="every 4 -> 8, over the budget")
        one.send(step, one.wave(step), overhead_ratio=0.05 if step == 16 else 0.012,
                 sent_ns=time.time_ns() + 3600 * 10**9, events=(cadence,) if step == 16 else ())
        one.send(step + 1)
    open_run(page, dashboard, one.run)
    expect(page.locator("#probe")).to_contain_text("1.2 %, at most 5 % in these steps")
    expect(page.locator("#probe")).to_contain_text("step 16: every 4 -> 8, over the budget")
    expect(page.locator("#probe")).to_contain_text(re.compile(r"3(600|59\d) s ahead of the collector's"))
    expect(page.locator("#probe dd").last).to_have_text("none")
    line = page.locator(".overhead-line")
    expect(line).to_have_attribute("d", re.compile(r"^M[\d. ]+(L[\d. ]+){9}$"))
    expect(page.locator(".overhead-lane svg")).to_have_attribute("aria-label", re.compile("now 0.012"))
    expect(page.locator(".event-mark")).to_have_attribute("title", re.compile("step 16 · cadence"))


def test_a_probe_that_has_not_told_its_overhead(
    page: Page, dashboard: Service, job: Callable[..., Job]
) -> None:
    """No lane without a line, and words that say so."""
    one = job().start()
    one.send(0, one.wave(0))
    open_run(page, dashboard, one.run)
    expect(page.locator("#probe")).to_contain_text("not known yet")
    expect(page.locator("#probe")).to_contain_text("as asked for")
    expect(page.locator(".overhead-lane")).to_be_hidden()
    expect(page.locator(".loss-lane")).to_be_visible()


def test_a_layer_is_sent_to_bf16_and_the_page_shows_each_state(
    page: Page, dashboard: Service, job: Callable[..., Job]
) -> None:
    """To BF16 on a layer clicked on the map: queued, delivered, applied at a step; the layer then is BF16."""
    one = job().start()
    one.send(0, one.wave(0))
    open_run(page, dashboard, one.run)
    expect(page.locator("#to-bf16")).to_be_disabled()
    point_at(page, step=0, steps=1, row=1, rows=2)
    page.mouse.down()
    page.mouse.up()
    expect(page.locator("#layer")).to_contain_text("layers.1")
    page.click("#to-bf16")
    page.fill("#reason", "it underflows")
    page.click("#confirm-yes")
    state = page.locator(".command .state")
    expect(state).to_have_text("queued")
    expect(page.locator("#confirm")).to_be_hidden()
    (command,) = one.fetch()
    assert command.action.modules == ("layers.1",)
    assert command.action.precision == "bf16"
    assert command.reason == "it underflows"
    expect(state).to_have_text("delivered")
    one.send(3, one.wave(3), reports=(
        CommandReport(id=command.id, state="applied", step=3, steps_by_rank=(3, 3)),))
    expect(state).to_have_text("applied")
    expect(page.locator("#commands .command")).to_contain_text("at step 3 on all 2 ranks")
    expect(page.locator("#layer-info")).to_contain_text("BF16")
    expect(page.locator("#to-fp8")).to_be_enabled()
    expect(page.locator("#to-bf16")).to_be_disabled()


def test_a_rejected_command_says_why(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """The probe's reason for a rejection is on the page."""
    one = job().start()
    one.send(0, one.wave(0))
    open_run(page, dashboard, one.run, "?layer=layers.0")
    page.click("#to-bf16")
    page.press("#reason", "Enter")
    expect(page.locator(".command .state")).to_have_text("queued")
    (command,) = one.fetch()
    one.send(1, reports=(
        CommandReport(id=command.id, state="rejected", step=1, reason="the layer is compiled"),))
    expect(page.locator(".command .state")).to_have_text("rejected")
    expect(page.locator("#commands .command")).to_contain_text("the layer is compiled")


def test_without_remote_control_the_buttons_say_why(
    page: Page, dashboard: Service, job: Callable[..., Job]
) -> None:
    """A run that takes no commands has disabled buttons and the reason beside them."""
    one = job(remote_control=False).start()
    one.send(0, one.wave(0))
    open_run(page, dashboard, one.run, "?layer=layers.0")
    expect(page.locator("#layer-note")).to_contain_text("remote_control=True")
    expect(page.locator("#to-bf16")).to_be_disabled()
    expect(page.locator("#to-fp8")).to_be_disabled()


def test_the_page_follows_the_run(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """New steps reach an open page over the websocket, without a reload."""
    one = job().start()
    one.send(0, one.wave(0))
    open_run(page, dashboard, one.run)
    page.evaluate("window.marked = true")
    for step in range(1, 6):
        one.send(step, one.wave(step))
        time.sleep(0.1)
    expect(page.locator("#live-badge")).to_have_text("connected · step 5")
    expect(page.locator(".strip")).to_contain_text("Step\n5", use_inner_text=True)
    assert page.evaluate("window.marked") is True


def test_the_address_holds_the_view(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """What is chosen is in the address, and the address alone brings it back; so does the back button."""
    one = job().start()
    for step in range(10):
        one.send(step, one.wave(step))
    open_run(page, dashboard, one.run)
    page.click("#role")
    page.get_by_role("option", name="gradient").click()
    page.wait_for_url("**role=gradient*")
    box = page.locator(".view").bounding_box()
    assert box is not None
    point_at(page, step=2, steps=10, row=0, rows=2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.65, box["y"] + 5, steps=4)
    page.mouse.up()
    page.wait_for_url("**first=2&last=6*")
    shared = page.url
    page.goto(dashboard.url)
    page.goto(shared)
    page.wait_for_selector(".picture[src]", state="attached")
    expect(page.locator("#role")).to_contain_text("gradient")
    expect(page.locator("#unzoom")).to_be_visible()
    page.click("#unzoom")
    page.wait_for_url(lambda address: "first=" not in address)
    page.go_back()
    page.wait_for_url("**first=2&last=6*")
    expect(page.locator("#unzoom")).to_be_visible()


def test_the_keyboard_reaches_a_cell(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """Arrow keys move over the map, the cell is said, Enter chooses its layer."""
    one = job().start()
    for step in range(5):
        one.send(step, one.wave(step))
    open_run(page, dashboard, one.run)
    page.focus(".view")
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator("#scope [aria-live]")).to_contain_text("layers.1, step 3: underflow ratio")
    page.keyboard.press("Enter")
    expect(page.locator("#layer")).to_contain_text("layers.1")
    page.keyboard.press("Escape")
    expect(page.locator(".tip")).to_be_hidden()


def test_the_theme_switches_page_and_picture(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """The button switches to light, the picture is asked for in light, and the choice is kept."""
    one = job().start()
    one.send(0, one.wave(0))
    open_run(page, dashboard, one.run)
    with page.expect_request(lambda request: "heatmap.png" in request.url and "theme=light" in request.url):
        page.click("#theme-button")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
