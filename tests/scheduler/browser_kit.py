"""A headless Chromium that is installed on this machine, driven by Playwright.

Playwright's own browsers are used where they are installed (`playwright install chromium`), then
Chromium or Chrome from the system (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

ARTEFACTS = Path(__file__).parents[1] / "artefacts"
_MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
_QUIET = (
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-quic", "--disable-gpu",
)  # fmt: skip


def _installed(own: str) -> str | None:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return next((path for path in (own, _MAC) if Path(path).exists()), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; skips the test where none is installed."""
    with sync_playwright() as playwright:
        path = _installed(playwright.chromium.executable_path)
        if path is None:
            pytest.skip("no Chromium is installed: `playwright install chromium` or apt-get")
        # The system's sandbox needs rights that root in a container does not have.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=[*_QUIET, *sandbox])
        try:
            yield browser
        finally:
            browser.close()
