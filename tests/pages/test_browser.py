"""Promise: a page renders in a real browser, from disk, and nothing fails in its console.

Needs Chromium; without one every test here is skipped and says so. Places of the pointer come from
the pictures themselves (where is this time, on this lane?), so no test knows a layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2._tools.pages.page import embed, render
from tests.kit import sample_pages as samples
from tests.kit.browser import Browser, find_chromium
from tests.kit.slow import with_slow

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install Debian's chromium, or name one in $CHROMIUM"
)
MIB = 1 << 20

# Of each picture: how many of its pixels are not the one in its corner.
DRAWN = """[...document.querySelectorAll('.picture canvas')].filter(c => c.offsetParent).map(c => {
  const found = c.getContext('2d').getImageData(0, 0, c.width, c.height);
  const data = new Uint32Array(found.data.buffer);
  return data.filter(one => one !== data[0]).length;
})"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as browser:
        yield browser


@pytest.fixture
def browser(shared: Browser) -> Iterator[Browser]:
    """A browser of a laptop's size that must not have complained when the test ends."""
    shared.problems.clear()
    shared.see(1280, 800)
    yield shared
    assert shared.problems == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name, page in samples.ALL.items():
        (folder / f"{name}.html").write_text(render(page), encoding="utf-8")
    (folder / "notebook.html").write_text(
        f"<!DOCTYPE html><title>cells</title>{embed(samples.SMALL)}", encoding="utf-8"
    )
    return folder


def chart(section: str) -> str:
    """What JavaScript calls the picture that is shown in a section."""
    first = f"[...document.querySelectorAll('#{section} .picture')].find(h => h.offsetParent)"
    return f"echarts.getInstanceByDom({first})"


def place(browser: Browser, section: str, grid: int, x: float, y: float) -> tuple[float, float]:
    """Return where a value of a picture is in the window, after scrolling there."""
    found = browser.run(
        f"(() => {{ const c = {chart(section)}, host = c.getDom();"
        "host.scrollIntoView({block: 'center'}); const box = host.getBoundingClientRect();"
        f"const at = c.convertToPixel({{gridIndex: {grid}}}, [{x}, {y}]);"
        "return [box.x + at[0], box.y + at[1]]; })()"
    )
    return float(found[0]), float(found[1])


def hover(browser: Browser, at: tuple[float, float]) -> list[str]:
    """Return the words that are shown where the pointer is: heading, cells, last word."""
    browser.move(*at)
    browser.settle()
    words = "document.querySelectorAll('.hover b, .hover td, .hover p')"
    found = browser.run(f"[...{words}].map(e => e.textContent).filter(t => t)")
    return [str(one) for one in found]


def units_box(browser: Browser) -> tuple[float, float, float]:
    """Return the left, top and right edge of the treemap in the window, after scrolling there."""
    host = "document.querySelector('#units .picture')"
    browser.run(f"{host}.scrollIntoView({{block: 'center'}})")
    box = browser.run(f"(b => [b.left, b.top, b.right])({host}.getBoundingClientRect())")
    return box[0], box[1], box[2]


def zoom(browser: Browser, section: str) -> tuple[float, float]:
    found = browser.run(f"{chart(section)}.getOption().dataZoom[0]")
    return round(found["startValue"], 9), round(found["endValue"], 9)


@pytest.mark.parametrize("is_dark", with_slow([False, True], [True]))
@pytest.mark.parametrize(("width", "height"), with_slow([(1280, 800), (480, 900)], [(480, 900)]))
@pytest.mark.parametrize("name", ["small", "large"])
def test_all_pictures_are_drawn(
    browser: Browser, folder: Path, name: str, width: int, height: int, is_dark: bool
) -> None:
    browser.see(width, height, is_dark=is_dark)
    browser.open(folder / f"{name}.html")
    drawn = browser.run(DRAWN)
    assert len(drawn) == 3
    assert min(drawn) > 5_000, drawn
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 24, 29)" if is_dark else "rgb(255, 255, 255)")
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_an_empty_page(browser: Browser, folder: Path) -> None:
    browser.open(folder / "empty.html")
    assert browser.run("document.querySelectorAll('section').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == "Nothing"


def test_hover_over_memory_tells_all_kinds(browser: Browser, folder: Path) -> None:
    """Between two moments memory is as it was at the first."""
    browser.open(folder / "small.html")
    words = hover(browser, place(browser, "memory", 0, 0.0042, 10 * MIB))
    assert words == [
        "4 ms: forward: block 4",
        *(
            "logits",
            "0 B",
            "activations",
            "6 MiB",
            "communication",
            "1.5 MiB",
            "gathered parameters",
            "6 MiB",
        ),
        *("gradients", "0 B", "optimizer state", "7.5 MiB", "parameters", "3.75 MiB"),
        *("all", "24.75 MiB", "measured", "25.24 MiB", "limit", "28 MiB"),
    ]


def test_a_peak_that_lasts_no_time_has_a_width(browser: Browser, folder: Path) -> None:
    browser.open(folder / "small.html")
    words = hover(browser, place(browser, "memory", 0, 0.0047, 10 * MIB))
    assert words[0] == "5 ms: before backward: block 4"
    assert words[words.index("all") + 1] == "29.25 MiB"


def test_hover_over_time_tells_a_span(browser: Browser, folder: Path) -> None:
    browser.open(folder / "small.html")
    assert hover(browser, place(browser, "times", 1, 2e-4, 0)) == [
        "all_gather blocks.0",
        *("lane", "rank 0, measured, compute", "begins", "0 s", "takes", "300 µs"),
        *("waits for", "all_gather blocks.0"),
    ]
    assert hover(browser, place(browser, "times", 0, 0.1e-3, 1)) == [
        "blocks.0",
        *("lane", "predicted, gathers", "begins", "0 s", "takes", "200 µs"),
        *("bytes", "24 MiB", "rate", "117.2 GiB/s", "4 ranks"),
    ]


def test_hover_over_units_and_drill_down(browser: Browser, folder: Path) -> None:
    browser.open(folder / "large.html")
    left, top, _ = units_box(browser)
    words = hover(browser, (left + 30, top + 60))  # blocks that are alike are one area
    layers = [unit for unit in samples.LARGE.units if unit.name.startswith("model.layers.")]
    last = layers[-1].name.rpartition(".")[2]
    assert words[0] == f"model.layers.0 to {last}: {len(layers)} units"
    browser.open(folder / "deep.html")
    left, top, _ = units_box(browser)
    assert hover(browser, (left + 30, top + 40))[0] == "blocks.0: 6 units"
    browser.click(left + 30, top + 40)
    root = f"{chart('units')}.getModel().getSeriesByIndex(0).getViewRoot()"
    assert browser.run(f"{root}.name") == "0"
    assert browser.run(f"{root}.children.map(c => c.name)") == [f"part_{i}" for i in range(6)][::-1]


def test_areas_are_shards_or_whole(browser: Browser, folder: Path) -> None:
    browser.open(folder / "small.html")
    total = f"{chart('units')}.getModel().getSeriesByIndex(0).getData().tree.root.getValue()"
    units = samples.SMALL.units
    assert browser.run(total) == sum(unit.shard_nbytes for unit in units)
    browser.run("document.querySelectorAll('#units .switch button')[1].click()")
    assert browser.run(total) == sum(unit.whole_nbytes + unit.padding_nbytes for unit in units)


def test_tabs(browser: Browser, folder: Path) -> None:
    """By the pointer and by keys; one panel is shown, and its picture drawn, at a time."""
    browser.open(folder / "small.html")
    shown = "[...document.querySelectorAll('#memory .panel')].filter(p => !p.hidden).map(p => p.id)"
    chosen = "document.querySelector('[aria-selected=true]').textContent"
    assert (browser.run(shown), browser.run(chosen)) == (["memory-panel-0"], "balanced")
    browser.run("document.getElementById('memory-tab-2').click()")
    assert (browser.run(shown), browser.run(chosen)) == (["memory-panel-2"], "fast")
    assert min(browser.run(DRAWN)) > 5_000
    browser.run("document.getElementById('memory-tab-2').focus()")
    for key, name in (("ArrowRight", "balanced"), ("ArrowRight", "low"), ("End", "fast")):
        browser.press(key)
        assert browser.run(chosen) == name
        assert browser.run("document.activeElement.textContent") == name


def test_a_kind_is_hidden_by_its_button(browser: Browser, folder: Path) -> None:
    browser.open(folder / "small.html")
    browser.run("document.querySelector('#memory .legend button').click()")
    selected = browser.run(f"{chart('memory')}.getOption().legend[0].selected")
    assert selected["logits"] is False


def test_zoom(browser: Browser, folder: Path) -> None:
    """By dragging, back by a double click; by keys; every rank's axis has the same range."""
    browser.open(folder / "large.html")
    whole = zoom(browser, "times")
    begin = place(browser, "times", 0, 0.3, 0)
    end = place(browser, "times", 0, 0.4, 0)
    browser.drag([begin, ((begin[0] + end[0]) / 2, begin[1]), end])
    found = zoom(browser, "times")
    assert found == (pytest.approx(0.3, abs=0.001), pytest.approx(0.4, abs=0.001))
    model = f"{chart('times')}.getModel()"
    axes = browser.run(
        f"[0, 1, 2, 3].map(i => {model}.getComponent('xAxis', i).axis.scale.getExtent())"
    )
    assert all(axis == axes[0] for axis in axes)
    browser.click(*begin, count=2)
    assert zoom(browser, "times") == whole
    browser.run(f"{chart('times')}.getDom().focus()")
    browser.press("+")
    length = whole[1] - whole[0]
    assert zoom(browser, "times") == (
        pytest.approx(whole[0] + length / 4, rel=1e-3),
        pytest.approx(whole[1] - length / 4, rel=1e-3),
    )
    browser.press("0")
    assert zoom(browser, "times") == whole


def test_the_wheel_zooms_with_control_and_scrolls_without(browser: Browser, folder: Path) -> None:
    browser.open(folder / "small.html")
    whole = zoom(browser, "times")
    at = place(browser, "times", 0, 0.005, 0)
    browser.move(*at)
    browser.move(*at, "mouseWheel", deltaX=0, deltaY=-120)
    browser.settle()
    assert zoom(browser, "times") == whole
    at = place(browser, "times", 0, 0.005, 0)
    browser.move(*at)
    browser.move(*at, "mouseWheel", deltaX=0, deltaY=-120, modifiers=2)
    browser.settle()
    found = zoom(browser, "times")
    assert found[1] - found[0] < whole[1] - whole[0]


def test_colours_follow_the_reader_and_the_switch(browser: Browser, folder: Path) -> None:
    browser.open(folder / "small.html")
    ink = f"{chart('memory')}.getOption().textStyle.color"
    assert browser.run(ink) == "#1b1f24"
    browser.see(1280, 800, is_dark=True)
    assert browser.run(ink) == "#e6edf3"
    browser.run("document.getElementById('theme').click()")
    assert browser.run(ink) == "#1b1f24"
    assert browser.run("document.getElementById('theme').textContent") == "Dark"


def test_paper_has_all_tabs_in_light_colours(browser: Browser, folder: Path) -> None:
    browser.see(1280, 800, is_dark=True)
    browser.open(folder / "small.html")
    browser.run(
        "window.seen = null; window.addEventListener('beforeprint', () => { seen = {"
        "dark: getComputedStyle(document.documentElement).colorScheme,"
        "inks: [...document.querySelectorAll('#memory .picture')].map(h =>"
        " echarts.getInstanceByDom(h).getOption().textStyle.color)}; })"
    )
    paper = browser.paper()
    assert paper.startswith(b"%PDF")
    assert browser.run("seen") == {"dark": "light", "inks": ["#1b1f24"] * 3}
    browser.settle()
    assert browser.run(f"{chart('memory')}.getOption().textStyle.color") == "#e6edf3"
    assert zoom(browser, "times")[0] == 0


def test_names_are_never_code(browser: Browser, folder: Path) -> None:
    """See [Note: untrusted names]: all are shown as they are, none does anything."""
    browser.open(folder / "hostile.html")
    assert browser.run("document.title") == samples.HOSTILE
    assert browser.run("document.querySelectorAll('img, b b').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == samples.HOSTILE
    assert min(browser.run(DRAWN)) > 5_000
    for section, at in (("times", (0, 0.5, 0)), ("memory", (0, 0.5, 1))):
        assert any(samples.HOSTILE in word for word in hover(browser, place(browser, section, *at)))
    _, top, right = units_box(browser)
    assert samples.HOSTILE in hover(browser, (right - 30, top + 30))
    assert browser.run("document.querySelectorAll('img').length") == 0


def test_the_policy_runs_no_other_script_and_loads_nothing(shared: Browser, folder: Path) -> None:
    shared.open(folder / "small.html")
    shared.problems.clear()
    shared.run(
        "new Promise(done => { const added = document.createElement('script'), image = new Image();"
        "added.textContent = 'seen = 1'; image.onerror = () => done();"
        "document.body.append(added); image.src = 'x.png'; })"
    )
    assert shared.run("typeof seen") == "undefined"
    assert len([one for one in shared.problems if "Content Security Policy" in one]) == 2
    shared.problems.clear()


def test_in_a_notebook(browser: Browser, folder: Path) -> None:
    """In a frame of its own: with its height, and drawn (the frame cannot be looked into)."""
    browser.open(folder / "notebook.html")
    empty = len(browser.picture())
    assert browser.run("document.querySelector('iframe').clientHeight") == 720
    assert empty > 20_000  # bytes of the PNG; a white one has 5,000
