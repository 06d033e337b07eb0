"""Make the pictures of docs/pictures anew: `python scripts/screenshots.py RUN_DIR`, a run with samples. Needs
Debian's chromium and chromium-driver, and the package selenium.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
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
    """A headless one that keeps what a page writes to the console."""
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


def look(browser: webdriver.Chrome, width: int, height: int, *, is_dark: bool = False) -> None:
    """From now on as a screen of this size, in CSS pixels, shows it."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"prefers-color-scheme": "dark" if is_dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def picture(browser: webdriver.Chrome, width: int, height: int) -> bytes:
    """A PNG of the top of the page, as high as it is or as `height`."""
    most = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
    told: dict[str, Any] = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", told)["data"])


def console_picture(run_dir: Path) -> str:
    """What a terminal shows of the run at its last step and at its end, as SVG."""
    from rich.console import Console as RichConsole

    from asyncrl.observe.console import Console
    from asyncrl.observe.sample_text import sample_text
    from asyncrl.observe.samples import read_samples
    from asyncrl.observe.status import read_run
    from asyncrl.observe.verdict.verdict import summary_panel

    files = read_run(run_dir)
    assert files.verdict is not None, "it has steps"
    shown = RichConsole(record=True, width=80, file=io.StringIO(), force_terminal=True)
    num_steps, bound = files.config.trainer.num_steps, files.config.buffer.max_staleness
    console = Console(
        "live", run_name="quickstart", num_steps=num_steps, max_staleness=bound, file=io.StringIO()
    )
    console.goes_on(files.steps)
    console.show_activity("training")
    for sample in read_samples(run_dir, [], num_steps)[-1:]:
        shown.print(sample_text(sample), style="dim", markup=False, highlight=False)
    shown.print(console.panel())
    shown.print(summary_panel(files.verdict, title="quickstart: done"))
    svg = shown.export_svg(title="asyncrl run configs/quickstart.yaml", unique_id="console")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # of another host


def save(png: bytes, name: str) -> None:
    """With fewer colours, as a file of docs/pictures."""
    from PIL import Image

    Image.open(io.BytesIO(png)).quantize(192).save(PICTURES / f"{name}.png", optimize=True)


def main(run_dirs: list[Path]) -> None:
    """The page, light and dark, as a wide screen shows it; and what the console shows of the first run."""
    from asyncrl.observe.page.render import make_page, render

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        file = Path(folder) / "report.html"
        file.write_text(render(make_page(run_dirs)), encoding="utf-8")
        for name, is_dark in (("report", False), ("report-dark", True)):
            look(browser, 1280, 1000, is_dark=is_dark)
            browser.get(file.as_uri())
            save(picture(browser, 1280, 1830), name)
        (Path(folder) / "console.svg").write_text(console_picture(run_dirs[0]), encoding="utf-8")
        file.write_text('<body style="margin: 0"><img src="console.svg" width="900">', encoding="utf-8")
        look(browser, 900, 800)
        browser.get(file.as_uri())
        save(picture(browser, 900, 1000), "console")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
