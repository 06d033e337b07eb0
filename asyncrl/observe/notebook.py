"""A panel in the output of a notebook's cell, replaced in place while it changes."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable

from rich.console import Console, RenderableType

REPAINT_S = 1.0
_WIDTH = 100
_HTML = '<pre style="line-height: 1.2; white-space: pre">{code}</pre>'


def is_in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookLive:
    """Shows what `get_renderable` returns, as rich's Live does on a terminal.

    Life: silent until start(); repaints in its thread until stop(), which leaves the last picture.
    """

    def __init__(self, get_renderable: Callable[[], RenderableType]) -> None:
        self._get_renderable = get_renderable
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repaint, name="notebook panel", daemon=True)

    def start(self) -> None:
        """Show the panel."""
        from IPython.display import display

        self._handle = display(self._picture(), raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Paint once more, and no more after that."""
        self._stopped.set()
        self._thread.join()
        self._handle.update(self._picture(), raw=True)

    def _repaint(self) -> None:
        while not self._stopped.wait(REPAINT_S):
            self._handle.update(self._picture(), raw=True)

    def _picture(self) -> dict[str, str]:
        """Return the panel by MIME type."""
        console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
        console.print(self._get_renderable())
        html = console.export_html(inline_styles=True, code_format=_HTML, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}
