"""The page of pykvq eval --html: self-contained, and as a browser shows it in light and in dark."""
import re
import shutil

import architectures
import pytest
from click.testing import CliRunner

from pykvq.cli import main

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYKVQ_CACHE_DIR", str(folder / "cache"))
        result = CliRunner().invoke(main, ["eval", str(architectures.sliding_window(folder / "tiny.gguf")), "--quick", "--ctx", "96", "--length", "384",
                                           "--threads", "2", "--kv-type", "turbo3", "--kv-type", "q8_0", "--kv-sink", "0", "--kv-recent", "0",
                                           "--html", str(folder / "page.html")])
    assert result.exit_code in (0, 1), result.output
    return folder / "page.html"


def test_page_is_self_contained_and_small(page):
    text = page.read_text()
    assert len(text) < 3_000_000 and text.count("<svg") == 3
    namespaces = r"http://www\.w3\.org/|http://purl\.org/|http://creativecommons\.org/"
    assert not re.search(rf'(src|href)="(?!#)(?!{namespaces})', text) and "<script" not in text and "@import" not in text
    assert "tiny-gemma3" in text and "currentColor" in text and "#010203" not in text


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        yield p.chromium.launch(executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme, ink, paper", [("light", "rgb(28, 30, 33)", "rgb(255, 255, 255)"), ("dark", "rgb(228, 230, 233)", "rgb(22, 24, 28)")])
def test_page_in_a_browser(page, browser, scheme, ink, paper):
    tab = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
    faults, requests = [], []
    tab.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(page.as_uri())
    assert faults == [] and requests == [page.as_uri()]
    assert tab.title() == "pykvq eval: tiny-gemma3"
    assert tab.evaluate("getComputedStyle(document.body).color") == ink and tab.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    assert tab.evaluate("getComputedStyle(document.querySelector('svg text')).fill") == ink          # the plots' text too
    assert tab.locator("#figures tr").count() == 7 and tab.locator("svg").count() == 3
    for plot in tab.locator("svg").all():
        box = plot.bounding_box()
        assert box["width"] > 300 and 50 < box["height"] < 600
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390                                # tables scroll by themselves
    tab.close()
