"""Hostile names (D3) and missing data (D5) in a real browser."""

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

Service = Any
Job = Any

NAMES = ("model.layers.0.mlp.up_proj", "a{b}", "a.b", "a_b", "<img src=x onerror=alert(1)>", '{"index":0}',
         "a&layer=x")


def test_d3_each_layer_is_chosen_by_a_click_whatever_its_name(
    page: Page, dashboard: Service, job: Callable[..., Job], complaints: list[str]
) -> None:
    """D3: names with dots, braces and markup are text; a click on each selects exactly that layer."""
    one = job(modules=NAMES).start()
    one.send(0, one.wave(0))
    page.goto(f"{dashboard.url}/runs/{one.run}")
    rows = page.locator("#layers .layer-row")
    expect(rows).to_have_count(len(NAMES))
    for name in NAMES:
        page.locator("#layers .layer-row").filter(
            has=page.locator(".ellipsis").get_by_text(name, exact=True)).click()
        expect(page.locator("#layers .layer-row.chosen")).to_have_attribute("data-layer", name)
        expect(page.locator("#layers .layer-row.chosen")).to_have_count(1)
        assert parse_qs(urlsplit(page.evaluate("location.href")).query)["layer"] == [name]
    for row, name in enumerate(NAMES):
        box = page.locator(".view").bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + 40, box["y"] + box["height"] * (row + 0.5) / len(NAMES))
        expect(page.locator("#layers .layer-row.chosen")).to_have_attribute("data-layer", name)
    assert page.locator("main img[src=x]").count() == 0
    assert complaints == []


def test_d5_clearing_the_layer_is_an_empty_state(
    page: Page, dashboard: Service, job: Callable[..., Job]
) -> None:
    """D5: clearing the layer box says that no layer is chosen, and the next choice works."""
    one = job().start()
    one.send(0, one.wave(0))
    page.goto(f"{dashboard.url}/runs/{one.run}?layer=layers.0")
    expect(page.locator("#layer")).to_contain_text("layers.0")
    page.locator(".layer-panel .dash-dropdown-clear").click()
    expect(page.locator("#layer-info")).to_contain_text("No layer is chosen")
    page.locator("#layers .layer-row").nth(1).click()
    expect(page.locator("#layer")).to_contain_text("layers.1")


def test_d5_a_run_without_data_fills_itself(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """D5: a run that has sent nothing yet is an empty state that becomes the map when data arrives."""
    one = job().start()
    page.goto(f"{dashboard.url}/runs/{one.run}")
    expect(page.locator("#run-page")).to_contain_text("No samples in these steps")
    one.send(0, one.wave(0))
    page.wait_for_selector(".picture[src]")


def test_d5_only_nan(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """D5: a run with nothing but NaN is drawn, not an error."""
    one = job().start()
    one.send(0, np.full(len(one.layout.series), np.nan, dtype=np.float32), loss=float("nan"))
    page.goto(f"{dashboard.url}/runs/{one.run}")
    page.wait_for_selector(".picture[src]")
    expect(page.locator("#worst")).to_contain_text("NaN")


def test_d5_unknown_names_in_the_address(page: Page, dashboard: Service, job: Callable[..., Job]) -> None:
    """D5: an unknown run, layer, metric or page is said in words; the way back works."""
    one = job().start()
    one.send(0, one.wave(0))
    page.goto(f"{dashboard.url}/runs/no-such-run")
    expect(page.locator("#run-empty")).to_contain_text("no-such-run")
    page.locator("#run-empty a").click()
    expect(page.locator("#runs-table")).to_contain_text(one.run)
    page.goto(f"{dashboard.url}/nowhere/at/all")
    expect(page.locator("#lost-page")).to_be_visible()
    page.goto(f"{dashboard.url}/runs/{one.run}?metric=nope&role=nope&first=9&last=1&layer=gone")
    page.wait_for_selector(".picture[src]")
    expect(page.locator("#layer-info")).to_contain_text("no layer called gone")


def test_d5_no_server_error_was_logged(dashboard: Service, client: httpx.Client) -> None:
    """D5: after all of the above the dashboard's log holds no traceback."""
    assert client.get("/runs").status_code == 200
    assert "Traceback" not in dashboard.log.read_text()
