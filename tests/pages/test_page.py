"""Promise: a page is one file that loads nothing, whatever names are in it. Needs no browser."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fsdp2._tools.pages import page as pages
from fsdp2._tools.pages.content import MemoryTab, Moment, Page
from tests.kit import sample_pages as samples

# Of the npm package echarts 6.1.0, whose tarball has the integrity that docs/decisions/0018 gives.
RELEASE = {
    "echarts.min.js": "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0",
    "LICENSE": "634293835b43a6dd2094fa39182a3d9a6b9ca43b7fdb9ac354e8037af2a3093a",
    "NOTICE": "d491d358344f842685c1b1585970999db65fe30ecf7ef3867af8814f4016c016",
    "LICENSE-d3": "e1211892da0b0e0585b7aebe8f98c1274fba15bafe47fa1f4ee8a7a502c06304",
}


class Read(HTMLParser):
    """What a browser would make of a page: tags with attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._is_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if self._is_script:
            self.scripts.append(data)


def test_the_library_is_the_release() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in pages.LIBRARY.parent.iterdir()
    }
    assert found == RELEASE


@pytest.mark.parametrize("name", samples.ALL)
def test_nothing_is_loaded_and_no_script_but_ours_runs(name: str) -> None:
    read = Read(pages.render(samples.ALL[name]))
    loading = [tag for tag, found in read.tags if {"src", "href", "action", "data"} & set(found)]
    assert loading == []
    assert not any(key.startswith("on") for _, found in read.tags for key in found)
    (policy,) = [found["content"] for _, found in read.tags if "http-equiv" in found]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    values, *scripts = read.scripts
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(scripts) == 2
    assert set(json.loads(values)) == {"units", "memory", "times"}


def test_names_stay_names() -> None:
    read = Read(pages.render(samples.HOSTILE_PAGE))
    assert not {"img", "iframe", "object"} & {tag for tag, _ in read.tags}
    assert "<" not in read.scripts[0]
    assert json.loads(read.scripts[0])["memory"][0]["name"] == samples.HOSTILE
    pages.render(samples.HOSTILE_PAGE).encode("utf-8")  # half a surrogate pair is in it


def test_what_is_empty_is_left_out() -> None:
    tags = [tag for tag, _ in Read(pages.render(samples.EMPTY)).tags]
    assert "section" not in tags
    assert "h2" not in tags


def test_text_is_there_without_scripts() -> None:
    text = unescape(re.sub(r"<script.*?</script>", "", pages.render(samples.SMALL), flags=re.S))
    for advice in samples.SMALL.advice:
        assert advice.found in text
        assert advice.change in text
    for fact in samples.SMALL.facts:
        assert fact.value in text
    assert "reduce_scatter" in text


def test_a_number_that_json_lacks_is_refused() -> None:
    """A page would be broken without a word: a browser cannot read such a number."""
    moments = (Moment(float("nan"), "", (1,)),)
    page = Page("x", "", memory=(MemoryTab("x", ("a",), moments, is_timed=True),))
    with pytest.raises(ValueError, match="not JSON compliant"):
        pages.render(page)


def test_embedded_it_is_a_frame_of_its_own() -> None:
    ((tag, found),) = Read(pages.embed(samples.HOSTILE_PAGE)).tags
    assert tag == "iframe"
    assert found["sandbox"] == "allow-scripts"
    assert found["srcdoc"] == pages.render(samples.HOSTILE_PAGE)


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    pages.write_page(target, samples.SMALL)
    assert target.read_text(encoding="utf-8") == pages.render(samples.SMALL)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match=r"full.*page\.html"):
        pages.write_page(target, samples.EMPTY)
    assert os.listdir(tmp_path) == ["page.html"]
    assert target.read_text(encoding="utf-8") == pages.render(samples.SMALL)


def test_importing_all_names_reads_no_library() -> None:
    """What draws is read when something is drawn: a training program never pays for it."""
    code = (
        "from fsdp2 import *; from fsdp2._tools.pages import page;"
        "print(page._library.cache_info().currsize)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "0\n"
