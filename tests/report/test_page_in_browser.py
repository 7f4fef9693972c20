"""The page as a browser shows it; skipped where there is no Chromium to drive."""

from __future__ import annotations

import io
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_run import hostile, masks, run
from PIL import Image

from equipoise.report import render_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed"
)

QUIET = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
)
# a screenshot before the first frames can meet the page that is being left
PAINTED = (
    "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
)
CONTRASTS = """
const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const parse = t => {
  const c = t.match(/[\\d.]+/g).map(Number);
  return c.length < 4 ? [...c, 1] : c;
};
const over = (c, b) => [0, 1, 2].map(k => c[3] * c[k] + (1 - c[3]) * b[k]);
const behind = e => {
  if (!e) return [255, 255, 255];
  const c = parse(getComputedStyle(e).backgroundColor);
  return c[3] === 1 ? c : over(c, behind(e.parentElement));
};
const found = {};
const texts = 'h1, h2, h3, p, dt, dd, th, td, b, li, caption, figcaption, svg text';
for (const e of document.querySelectorAll(texts)) {
  if (!e.textContent.trim()) continue;
  const style = getComputedStyle(e), back = behind(e);
  const a = light(parse(e.tagName === 'text' ? style.fill : style.color)), b = light(back);
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  found[e.tagName] = Math.min(found[e.tagName] ?? 99, ratio);
}
return found;
"""
SMALLEST_TEXT = """
return Math.min(...[...document.querySelectorAll('svg.chart')].map(svg => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return scale * parseFloat(getComputedStyle(svg.querySelector('text')).fontSize); }));
"""
CLIPPED = """
return [...document.querySelectorAll('svg.chart')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  }).map(text => text.textContent);
});
"""
BOXES = """
return [...document.querySelectorAll('svg.chart')].map(svg =>
  [...svg.querySelectorAll('text')].map(text => {
    const box = text.getBoundingClientRect();
    return [text.textContent, box.left, box.top, box.right, box.bottom];
  }));
"""


class Browser:
    """A browser with pages to open at any width, in light or dark."""

    def __init__(self, driver: Any, pages: dict[str, Path]) -> None:
        self.driver = driver
        self.pages = pages

    def show(self, name: str, width: int, scheme: str = "light") -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(self.pages[name].as_uri())
        self.driver.execute_async_script(PAINTED)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def pixels(self) -> np.ndarray:
        return np.asarray(
            Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        ).astype(np.float64)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("pages")
    reports = {"ordinary": run(samples=masks(), ignore=255), "hostile": hostile()}
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(render_report(report), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*QUIET, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield Browser(driver, {name: folder / f"{name}.html" for name in reports})
    driver.quit()


@pytest.mark.parametrize("name", ["ordinary", "hostile"])
def test_page_loads_without_complaint_and_fetches_nothing(browser: Browser, name: str) -> None:
    browser.driver.get_log("browser")
    browser.show(name, 1280)
    assert (
        browser.driver.get_log("browser") == []
    )  # where errors and breaches of the content policy would be
    fetched = browser.run(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert all(address.startswith("data:image/png") for address in fetched)
    assert (
        browser.run(
            "return document.querySelectorAll('script, iframe, object, embed, link, "
            "[style]').length"
        )
        == 0
    )
    assert browser.run(
        "return [...document.images].every(image => image.complete && image.naturalWidth > 0)"
    )
    assert (
        browser.run("return getComputedStyle(document.querySelector('h1')).fontWeight") == "650"
    )  # the hash lets the style in


def test_page_policy_stops_what_would_get_past_the_escaping(
    browser: Browser, tmp_path: Path
) -> None:
    source = browser.pages["ordinary"].read_text(encoding="utf-8")
    smuggled = (
        "<script>document.title = 'owned'</script><style>h1 { color: red }</style><img "
        "src='smuggled.png'>"
    )
    browser.pages["smuggled"] = tmp_path / "smuggled.html"
    browser.pages["smuggled"].write_text(
        source.replace("</main>", f"{smuggled}</main>"), encoding="utf-8"
    )
    browser.show("smuggled", 1280)
    complaints = [entry["message"] for entry in browser.driver.get_log("browser")]
    for kind in ("inline script", "inline style", "Loading the image"):
        assert any(
            kind in message and "Content Security Policy" in message for message in complaints
        )
    assert browser.driver.title.startswith("mnist with opteq-mnist, 16 November 2026")


@pytest.mark.parametrize("name", ["ordinary", "hostile"])
@pytest.mark.parametrize("width", [360, 390, 800, 1280])
def test_page_fits_the_window(browser: Browser, name: str, width: int) -> None:
    browser.show(name, width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    columns = browser.run(
        "return "
        "getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length"
    )
    assert columns == (1 if width < 800 else 2)
    assert browser.run(SMALLEST_TEXT) > 9.5
    assert browser.run(CLIPPED) == []
    for boxes in browser.run(BOXES):
        for (first, left, top, right, bottom), (second, *other) in itertools.combinations(boxes, 2):
            apart = (
                right <= other[0]
                or other[2] <= left
                or bottom <= other[1] + 2
                or other[3] <= top + 2
            )
            assert apart, f"{first!r} lies on {second!r}"


def test_page_is_light_or_dark_as_the_reader_likes(browser: Browser) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.show("ordinary", 1000, scheme)
        pixels = browser.pixels()
        seen[scheme] = pixels[2, 2]
        assert pixels.std() > 8  # not blank
        chart = browser.run(
            "return "
            "Object.values(document.querySelector('svg.chart').getBoundingClientRect().toJSON())"
        )
        left, top, wide, high = map(int, chart[:4])
        patch = pixels[top : top + high, left : left + wide].reshape(-1, 3)
        assert (
            np.abs(patch - pixels[2, 2]).max(axis=1) < 3
        ).mean() > 0.6  # no box of another colour behind the curves
        assert (
            np.abs(patch - pixels[2, 2]).max(axis=1) > 60
        ).mean() > 0.01  # and curves that can be seen
    assert seen["light"].min() > 240
    assert seen["dark"].max() < 40


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_text_stands_out(browser: Browser, scheme: str) -> None:
    browser.show("ordinary", 1280, scheme)
    found = browser.run(CONTRASTS)
    assert {"H1", "DD", "TD", "B", "LI", "text"} <= set(found)
    assert min(found.values()) >= 4.5  # WCAG AA


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_curves_stand_out(browser: Browser, scheme: str) -> None:
    browser.show("ordinary", 1280, scheme)
    names = ["--page", *(f"--line-{k}" for k in range(1, 7))]
    values = browser.run(
        f"const s = getComputedStyle(document.documentElement); return {names}.map(n => "
        "s.getPropertyValue(n))"
    )
    page, *lines = (luminance(value.strip()) for value in values)
    assert all(
        (max(page, line) + 0.05) / (min(page, line) + 0.05) >= 3 for line in lines
    )  # WCAG's bound for graphics


def luminance(colour: str) -> float:
    assert re.fullmatch("#[0-9a-f]{6}", colour)
    channels = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
