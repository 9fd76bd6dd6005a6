"""Pictures of pages for the README and the docs: ``scripts/pictures [FOLDER]``.

Owns what is shown and how small the files are. A page that changes its looks is looked at here
first: run the script, and look at every picture.
"""

from __future__ import annotations

import argparse
import base64
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fsdp2
from fsdp2._tools.pages.content import Page
from fsdp2._tools.pages.page import write_page
from tests.kit import sample_pages as samples
from tests.kit.browser import Browser, find_chromium

ROOT = Path(__file__).parents[2]
SKIPPED = 77
MOST_NBYTES = 150_000


@dataclass(frozen=True)
class Shot:
    """A part of a page at a width, in light or dark colours: only ``sections`` are shown."""

    page: str
    sections: tuple[str, ...]
    width: int
    is_dark: bool

    @property
    def name(self) -> str:
        width = "" if self.width > 640 else "-narrow"
        return f"{self.page}{width}-{'dark' if self.is_dark else 'light'}.png"


PARTS = {
    "plan": (".facts", ".advice", "#units", "#memory", "#times"),
    "recording": (".facts", "#memory", "#times"),
}
SHOTS = [
    Shot(page, sections, width, is_dark)
    for page, sections in PARTS.items()
    for width in (1280, 400)
    for is_dark in (False, True)
]


def plan_page() -> Page:
    """Plan the example's transformer, at a size worth sharding."""
    sys.path.insert(0, str(ROOT / "examples"))
    from _model import Block, ModelConfig, Transformer

    with torch.device("meta"):
        model = Transformer(ModelConfig(width=2048, layers=24, heads=16, sequence_length=2048))
    tokens = torch.zeros(4, 2048, dtype=torch.long)
    found = fsdp2.plan(
        model,
        mesh=(2, 32),
        policy={Block},
        batch=(tokens, tokens),
        optimizer=torch.optim.AdamW,
        hardware="h100-nvlink-ib",
        mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    return found.page()


def recording_page() -> Page:
    """Tell a recording of four ranks on this machine; a sample, where none can be made."""
    reader = getattr(fsdp2, "read_recordings", None)
    if reader is None:
        return samples.RECORDED
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        program = str(Path(__file__).with_name("_recorded.py"))
        known = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ}
        subprocess.run([sys.executable, *launch, program, folder], check=True, env=known)
        page: Page = reader(folder).page()
    return page


SITE = ROOT / "build" / "site"
SITE_PAGES = {
    "first": "docs/index",
    "tutorial": "docs/tutorial/step1",
    "guide": "docs/guides/memory",
    "reference": "docs/reference/plan",
    "error": "fsdp2/_core/errors/ranks",
}


def site_pictures(browser: Browser) -> Iterator[tuple[str, bytes]]:
    """Yield a name and a picture of some pages of the manual, as `scripts/docs` built it."""
    for name, page in SITE_PAGES.items():
        for width, word in ((1280, ""), (400, "-narrow")):
            browser.see(width, 800)
            browser.open(SITE / f"{page}.html")
            yield f"site-{name}{word}.png", browser.picture()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/pictures", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", choices=tuple(PARTS), help="pictures of this page alone")
    parser.add_argument("--site", action="store_true", help="of what scripts/docs built, instead")
    given = parser.parse_args(arguments)
    program = find_chromium()
    if program is None:
        print("no Chromium: install Debian's chromium, or name one in $CHROMIUM", file=sys.stderr)
        return SKIPPED
    given.folder.mkdir(parents=True, exist_ok=True)
    too_large = 0
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        taken = page_pictures(browser, Path(folder), given.only)
        for name, png in site_pictures(browser) if given.site else taken:
            found = smaller(browser, png)
            (given.folder / name).write_bytes(found)
            print(f"{given.folder / name}: {len(found):,} bytes")
            too_large += len(found) > MOST_NBYTES
        for problem in browser.problems:
            print(problem, file=sys.stderr)
    return 1 if browser.problems or too_large else 0


def page_pictures(browser: Browser, folder: Path, only: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield a name and a picture of each page's parts."""
    for page, make in {"plan": plan_page, "recording": recording_page}.items():
        if only not in (None, page):
            continue
        path = folder / f"{page}.html"
        write_page(path, make())
        for shot in (one for one in SHOTS if one.page == page):
            yield shot.name, take(browser, path, shot)


def take(browser: Browser, path: Path, shot: Shot) -> bytes:
    browser.see(shot.width, 800, is_dark=shot.is_dark)
    browser.open(path)
    shown = ", ".join(shot.sections)
    browser.run(
        "document.querySelectorAll('main > section').forEach(one =>"
        f" one.hidden = !one.matches({shown!r}))"
    )
    browser.settle()
    height = browser.run("Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)")
    return browser.picture(x=0, y=0, width=shot.width, height=height + 24)


# [Note: small pictures]
# A page has few colours, and its letters have shades of them. The most frequent 256 are kept and
# each other one becomes the nearest of these, which nobody sees and makes a file a third as large.
# The browser reads the pixels: it has a decoder, and the package must not ask for another one.
REDUCE = """async (png) => {
  const image = new Image();
  image.src = 'data:image/png;base64,' + png;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height), pen = canvas.getContext('2d');
  pen.drawImage(image, 0, 0);
  const pixels = new Uint32Array(pen.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  const kept = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, 256);
  const parts = (pixel) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
  const nearest = (pixel) => {
    const [r, g, b] = parts(pixel);
    let best = 0, least = Infinity;
    kept.forEach((one, at) => {
      const [x, y, z] = parts(one), far = (x - r) ** 2 + (y - g) ** 2 + (z - b) ** 2;
      if (far < least) [best, least] = [at, far];
    });
    return best;
  };
  const places = new Map([...counts.keys()].map((pixel) => [pixel, nearest(pixel)]));
  const indices = Uint8Array.from(pixels, (pixel) => places.get(pixel));
  const text = (bytes) => new Promise((done) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.split(',')[1]);
    reader.readAsDataURL(new Blob([bytes]));
  });
  return {width: image.width, height: image.height,
    palette: kept.flatMap(parts), indices: await text(indices)};
}"""


def smaller(browser: Browser, png: bytes) -> bytes:
    """Return a picture with at most 256 colours. See [Note: small pictures]."""
    browser.send("Page.navigate", url="about:blank")  # whose policy lets images be read
    browser.wait_for("Page.loadEventFired")
    found = browser.run(f"({REDUCE})('{base64.b64encode(png).decode()}')")
    return indexed_png(found)


def indexed_png(found: dict[str, Any]) -> bytes:
    width, height = found["width"], found["height"]
    pixels = base64.b64decode(found["indices"])
    rows = b"".join(b"\0" + pixels[at * width : (at + 1) * width] for at in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, by palette
    chunks = (
        (b"IHDR", head),
        (b"PLTE", bytes(found["palette"])),
        (b"IDAT", zlib.compress(rows, 9)),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (*chunks, (b"IEND", b""))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
