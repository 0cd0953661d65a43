"""A real headless Chromium for tests of the pages."""

import shutil
from contextlib import contextmanager

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


def installed():
    """(browser, driver) or a skip that says what is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed: pip install -e .[dev]")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    return browser, driver


@contextmanager
def open_browser(folder, size=(1200, 900)):
    """A browser with a profile of its own in `folder`, whose console is recorded."""
    browser, driver = installed()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield session
    finally:
        session.quit()
