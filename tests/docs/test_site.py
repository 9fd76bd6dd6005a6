"""The built manual, as a reader has it: every link leads somewhere, and pages work in a browser.

It builds the site with warnings as errors, then looks at it in a real browser at two sizes. Skipped
where there is no generator or no browser; `scripts/docs test` runs it.
"""

from __future__ import annotations

import functools
import html.parser
import http.server
import importlib.util
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp2._core.base.paragraphs import read_paragraphs
from tests.docs._blocks import ROOT
from tests.kit.browser import Browser, find_chromium

GENERATOR = ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
MISSING = [name for name in GENERATOR if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the generator is not installed: {MISSING}"),
]
CHROMIUM = find_chromium()
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install Debian's chromium, or name one in $CHROMIUM"
)

# What a search has found: there is none before the index is loaded.
RESULTS = """(() => {
    const found = [...document.querySelectorAll('#search-results li a')].map(a => a.href);
    return found.length ? found : null;
})()"""
SIZES = {"wide": (1280, 800), "narrow": (480, 800)}
PAGES_TO_LOOK_AT = (
    "docs/index.html",
    "README.html",
    "docs/compatibility.html",
    "docs/clients.html",
    "docs/tutorial/index.html",
    "docs/tutorial/step1.html",
    "docs/guides/memory.html",
    "docs/guides/trouble.html",
    "docs/guides/from-deepspeed.html",
    "docs/reference/index.html",
    "docs/reference/sharding.html",
    "docs/reference/module.html",
    "docs/architecture.html",
    "docs/glossary.html",
    "docs/plan.html",
    "docs/record.html",
    "docs/pages.html",
    "docs/differences.html",
    "docs/reference/record.html",
    "benchmarks/results/host.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manual")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", "docs", "--fail-on-warning"]
    command += ["--keep-going", "--quiet", ".", str(folder / "site"), "-d", str(folder / "trees")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "site"


class Page(html.parser.HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe", "source", "use"):
            self.loaded += [given[name] for name in ("href", "src") if name in given]


def read_site(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_link_leads_somewhere(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = read_site(site)
    broken, count, outside = [], 0, set()
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                outside.add(link)
                continue
            count += 1
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            if not parts.path:
                target = path
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}")
            anchor = urllib.parse.unquote(parts.fragment)
            if anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken)
    with capsys.disabled():
        print(f"\n{len(pages)} pages, {count} links within the site, {len(outside)} to outside")


def test_every_error_is_listed_with_its_title(site: Path) -> None:
    listed = (site / "fsdp2/_core/errors/README.html").read_text()
    found = dict(re.findall(r'href="(?:\w+\.html)#(fs\d{3})">(.+?)</a>', listed))
    assert set(found) == {paragraph.code.lower() for paragraph in read_paragraphs()}
    for code, words in found.items():
        assert words.startswith(f"{code.upper()}: "), words


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path, page in read_site(site).items():
        assert not [link for link in page.loaded if urllib.parse.urlsplit(link).netloc], path
    for path in site.rglob("*.css"):
        addresses = re.findall(r"url\(['\"]?(?!data:)([^)'\"]+)", path.read_text())
        assert not [address for address in addresses if "//" in address], path


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes on to another page hangs up on this one."""


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(Silent, directory=str(site))
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def shared(served: str) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM, home=served) as browser:
        yield browser


@pytest.fixture
def wide(shared: Browser) -> Iterator[Browser]:
    """A browser whose console is quiet when the test ends, and that asked no other host."""
    shared.problems.clear()
    shared.see(*SIZES["wide"])
    yield shared
    assert shared.problems == []


@pytest.fixture
def narrow(wide: Browser) -> Browser:
    wide.see(*SIZES["narrow"])
    return wide


@pytest.fixture(params=list(SIZES))
def window(request: pytest.FixtureRequest, wide: Browser) -> Browser:
    wide.see(*SIZES[request.param])
    return wide


@needs_browser
@pytest.mark.parametrize("page", PAGES_TO_LOOK_AT)
def test_a_page_fits_its_window(window: Browser, served: str, page: str) -> None:
    """Wide tables and code scroll by themselves; the page does not."""
    window.open(f"{served}/{page}")
    too_wide = window.run(
        """(() => {
        const seen = document.documentElement.clientWidth;
        if (document.documentElement.scrollWidth <= seen) return [];
        return [...document.querySelectorAll("body *")]
            .filter(e => e.getBoundingClientRect().right > seen + 1)
            .slice(0, 5).map(e => e.outerHTML.slice(0, 120));
        })()"""
    )
    assert not too_wide


@needs_browser
def test_a_wide_table_scrolls(narrow: Browser, served: str) -> None:
    narrow.open(f"{served}/docs/compatibility.html")
    widths = narrow.run(
        """(() => {
        const wrapper = document.querySelector(".table-wrapper");
        wrapper.scrollLeft = 50;
        return [wrapper.scrollWidth, wrapper.clientWidth, wrapper.scrollLeft];
        })()"""
    )
    assert widths[0] > widths[1]
    assert widths[2] == 50


@needs_browser
@pytest.mark.parametrize("word", ["no_sync", "accumulation", "hang", "FS402"])
def test_search_finds(window: Browser, served: str, word: str) -> None:
    window.open(f"{served}/docs/index.html")
    window.open(f"{served}/search.html?q={word}")
    found = window.wait_until(RESULTS)
    assert all(link.startswith(served) for link in found)


@needs_browser
def test_search_from_the_first_page(wide: Browser, served: str) -> None:
    """As a reader does it: type a word, press return, follow the first result."""
    wide.open(f"{served}/")
    wide.wait_until(
        "location.pathname.endsWith('docs/index.html') && document.readyState == 'complete'"
    )
    wide.type("input[name=q]", "full_params")
    found = wide.wait_until(RESULTS)
    assert any("reference/parameters.html" in link for link in found)


@needs_browser
def test_search_without_a_server(wide: Browser, site: Path) -> None:
    wide.open(f"{(site / 'search.html').as_uri()}?q=no_sync")
    assert wide.wait_until(RESULTS)


@needs_browser
def test_code_is_copied(window: Browser, served: str) -> None:
    """The button gives the program, or the command without its prompt and without its output."""
    window.open(f"{served}/docs/tutorial/step1.html")
    window.click_on("div.highlight-console button.copybtn")
    found = window.read_clipboard()
    assert found == "torchrun --nproc-per-node 2 examples/tutorial/step1_shard.py"
    window.click_on("div.highlight-python button.copybtn")
    program = (ROOT / "examples" / "tutorial" / "step1_shard.py").read_text()
    assert window.read_clipboard().strip() == program.strip()


@needs_browser
def test_output_has_no_button(window: Browser, served: str) -> None:
    window.open(f"{served}/docs/guides/units.html")
    count = "document.querySelectorAll('div.highlight-{} button.copybtn').length"
    assert window.run(count.format("python")) > 0
    assert window.run(count.format("output")) == 0
