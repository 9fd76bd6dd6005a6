"""``render`` converts a ``Page`` to one HTML document that needs no server, network or packages.

Text is in the HTML itself, so that it can be read, searched and printed without scripts. The
scripts in ``js/`` and the library in ``echarts/`` draw pictures from values in a block of JSON.

[Note: untrusted names]
A module, and therefore a unit, may have any name, and users share pages. Text is escaped with
``escape``, JSON contains no ``<``, and scripts set only ``textContent``. The content security
policy forbids requests, and allows only the scripts whose hashes it lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fsdp2._tools.pages import content

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "echarts" / "echarts.min.js"
SCRIPTS = ("words", "pictures", "units", "memory", "times", "page")
"""Each script uses only earlier scripts in this list."""
EMBEDDED_HEIGHT = 720  # pixels
HEADLINES = ("good", "bad")
SEVERITIES = ("refused", "slow", "memory", "note")


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file atomically; the last of several writers wins. If the file cannot be
    written, raise OSError and leave an existing file unchanged."""
    # ranks on different machines may have the same process id and write to the same folder
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:  # name the requested file in the error, not the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def render(page: content.Page) -> str:
    """Return a complete HTML document that shows a page."""
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    scripts = (_library(), _own_script())
    allowed = " ".join(_hash(script) for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_text(page.title)}</title>",
        f"<style>{style}</style></head><body>",
        *_body(page),
        f'<script type="application/json" id="values">{_values(page)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def embed(page: content.Page) -> str:
    """Return an iframe with the complete page, for a notebook's ``_repr_html_``. The frame has a
    separate origin, so its contents cannot read the notebook."""
    style = f"width:100%;height:{EMBEDDED_HEIGHT}px;border:0"
    return (
        f'<iframe sandbox="allow-scripts" title="{_text(page.title)}" style="{style}" '
        f'srcdoc="{escape(render(page))}"></iframe>'
    )


def write_page(path: str | os.PathLike[str], page: content.Page) -> None:
    """Write a page to a file as an HTML document, atomically: see ``write_whole``."""
    write_whole(Path(path), render(page))


@cache
def _library() -> str:
    return LIBRARY.read_text(encoding="utf-8")


def _own_script() -> str:
    parts = [(FOLDER / "js" / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _text(text: str) -> str:
    """Escape text for HTML; unpaired surrogates, which no file can contain, are replaced."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def _body(page: content.Page) -> Iterator[str]:
    yield '<header><div class="heading">'
    yield f"<h1>{_text(page.title)}</h1>"
    if page.subtitle:
        yield f'<p class="subtitle">{_text(page.subtitle)}</p>'
    yield '</div><button type="button" id="theme" hidden></button></header><main>'
    if page.headline is not None:
        kind = page.headline.kind if page.headline.kind in HEADLINES else ""
        yield f'<p class="headline {kind}">{_text(page.headline.text)}</p>'
    yield from _facts(page.facts)
    yield from _advice(page.advice)
    pictures = {
        "units": (page.units, "Units", "Areas are proportional to bytes. Click a part to zoom in."),
        "memory": (page.memory, "Memory over a step", ""),
        "times": (page.time_lines, "Time", ""),
    }
    for name in page.order:
        shown, heading, hint = pictures[name]
        if shown:
            head = f'<section id="{name}"><h2>{heading}</h2><p class="hint">{hint}</p>'
            yield f'{head}<div class="place"></div></section>'
    for table in page.tables:
        yield from _table(table)
    if page.notes:
        yield '<section class="notes"><h2>Notes</h2><ul>'
        yield from (f"<li>{_text(note)}</li>" for note in page.notes)
        yield "</ul></section>"
    yield "</main><noscript><p>The pictures are drawn by scripts in this file.</p></noscript>"


def _facts(facts: Sequence[content.Fact]) -> Iterator[str]:
    if not facts:
        return
    yield '<section class="facts" aria-label="Figures">'
    for fact in facts:
        note = f"<small>{_text(fact.note)}</small>" if fact.note else ""
        yield f"<div><span>{_text(fact.name)}</span><b>{_text(fact.value)}</b>{note}</div>"
    yield "</section>"


def _advice(advice: Sequence[content.Advice]) -> Iterator[str]:
    if not advice:
        return
    yield '<section class="advice"><h2>Advice</h2><ol>'
    for one in advice:
        kind = one.severity if one.severity in SEVERITIES else "note"
        yield f'<li class="{kind}"><span class="badge">{_text(one.severity)}</span><div>'
        yield f"<p><b>{_text(one.about)}</b> {_text(one.found)}</p>"
        if one.change:
            yield f"<pre>{_text(one.change)}</pre>"
        if one.gain:
            yield f'<p class="gain">{_text(one.gain)}</p>'
        yield "</div></li>"
    yield "</ol></section>"


def _table(table: content.Table) -> Iterator[str]:
    yield f'<section><h2>{_text(table.heading)}</h2><div class="scroll"><table><thead><tr>'
    yield from (f'<th scope="col">{_text(column)}</th>' for column in table.columns)
    yield "</tr></thead><tbody>"
    for row in table.rows:  # narrow pages show the column's name before each cell
        cells = zip(table.columns, row, strict=True)
        yield "<tr>"
        yield from (f'<td data-column="{_text(name)}">{_text(cell)}</td>' for name, cell in cells)
        yield "</tr>"
    yield "</tbody></table></div></section>"


def _values(page: content.Page) -> str:
    """Return the page's values as JSON without HTML tags, in the form that ``js/`` reads."""
    values = {
        "units": [_unit(unit) for unit in page.units],
        "memory": [_tab(tab) for tab in page.memory],
        "times": [_time_line(line) for line in page.time_lines],
    }
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _unit(unit: content.UnitArea) -> dict[str, Any]:
    values = {name.removesuffix("_nbytes"): value for name, value in vars(unit).items()}
    values["ranks"] = values.pop("shard_ranks")
    return values


def _tab(tab: content.MemoryTab) -> dict[str, Any]:
    return {
        "name": tab.name,
        "kinds": list(tab.kinds),
        "moments": [[one.time, one.label, list(one.nbytes)] for one in tab.moments],
        "isTimed": tab.is_timed,
        "limit": tab.limit_nbytes,
        "measured": [[one.time, one.label, sum(one.nbytes)] for one in tab.measured],
        "measuredName": tab.measured_name or "measured",
    }


def _time_line(line: content.TimeLine) -> dict[str, Any]:
    return {
        "name": line.name,
        "lanes": list(line.lanes),
        "spans": [
            [line.lanes.index(s.lane), s.name, s.begin, s.end, s.nbytes, s.cause, s.note]
            for s in line.spans
        ],
    }
