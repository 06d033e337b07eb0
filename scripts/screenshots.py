"""Make docs/pictures/report.png: `python scripts/screenshots.py RUN_DIR` (a run with
samples).

Needs Debian's chromium and chromium-driver, and the package selenium.
"""

from __future__ import annotations

import base64
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
_ARGUMENTS = """--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars
--no-first-run --disable-background-networking --disable-component-update --disable-extensions"""
PICTURES = Path(__file__).parent.parent / "docs/pictures"


@contextlib.contextmanager
def open_browser() -> Iterator[webdriver.Chrome]:
    """Yield a headless browser that keeps the console messages of a page."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in _ARGUMENTS.split():
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield browser
    finally:
        browser.quit()


def look(browser: webdriver.Chrome, width: int, height: int) -> None:
    """Set the screen size in CSS pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def picture(browser: webdriver.Chrome, width: int, height: int) -> bytes:
    """Return a PNG of the top of the page, at most `height` pixels high."""
    most = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
    told: dict[str, Any] = {
        "format": "png",
        "captureBeyondViewport": True,
        "clip": clip,
    }
    return base64.b64decode(
        browser.execute_cdp_cmd("Page.captureScreenshot", told)["data"]
    )


def save(png: bytes, name: str) -> None:
    """Save a picture with fewer colors in docs/pictures."""
    from PIL import Image

    Image.open(io.BytesIO(png)).quantize(192).save(
        PICTURES / f"{name}.png", optimize=True
    )


def main(run_dirs: list[Path]) -> None:
    """Save the top of the report of these runs."""
    from asyncrl.observe.report_page import make_page, render

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        file = Path(folder) / "report.html"
        file.write_text(render(make_page(run_dirs)), encoding="utf-8")
        look(browser, 1280, 1000)
        browser.get(file.as_uri())
        save(picture(browser, 1280, 1830), "report")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
