"""How Sphinx makes the manual of this repository's Markdown files: see docs/decisions/0020.

The source folder is the repository itself, so that a relative link between two files means the same
in an editor, on a code host, and on the site. `scripts/docs` runs it.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "fsdp2"
author = "the authors of fsdp2"
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/**.md",
    "docs/**.md",
    "fsdp2/_core/errors/*.md",
]
exclude_patterns = [".*", "build", "dist", "tests", "scripts", "examples", "runs"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "notes")]

# `$ ` is what a reader does not type, and what a program printed is not to be copied.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_selector = "div:not(.highlight-output):not(.highlight-text) > div.highlight pre"

html_theme = "furo"
html_title = "fsdp2"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_js_files = ["manual.js"]
html_favicon = "_static/favicon.svg"
html_extra_path = ["_root"]  # the site's first page leads to docs/index.html
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_permalinks_icon = "#"
pygments_style = "default"
pygments_dark_style = "monokai"

NAVIGATION = {
    "docs/index": {
        "Learn": ["tutorial/index"],
        "Do": [
            "guides/running",
            "guides/units",
            "guides/memory",
            "guides/nodes",
            "guides/parallelism",
            "guides/activation-checkpointing",
            "guides/graphs",
            "guides/lora",
            "guides/muon",
            "guides/low-bits",
            "guides/experts",
            "guides/reinforcement-learning",
            "guides/evaluation",
            "guides/same-bits",
            "guides/checkpoints",
            "guides/restart",
            "guides/trouble",
            "guides/doctor",
            "guides/from-ddp",
            "guides/from-torch-fsdp2",
            "from-fsdp1",
            "guides/from-deepspeed",
        ],
        "Look up": [
            "reference/index",
            "../fsdp2/_core/errors/README",
            "glossary",
            "differences",
            "compatibility",
            "clients",
            "figures",
        ],
        "Understand": [
            "architecture",
            "checkpoints",
            "compile",
            "plan",
            "record",
            "pages",
            "decisions/README",
            "testing",
            "../benchmarks/README",
            "../README",
            "../CONTRIBUTING",
            "../CHANGELOG",
        ],
    },
    "docs/tutorial/index": {"": ["step*"]},
    "docs/reference/index": {
        "": [
            "sharding",
            "module",
            "policies",
            "wrap",
            "parameters",
            "training",
            "plan",
            "record",
            "weights",
            "checkpoint",
            "communication",
            "debug",
            "errors",
        ]
    },
    "docs/decisions/README": {"": ["0*"]},
    "benchmarks/README": {"": ["results/*", "results/gpu/*"]},
    "fsdp2/_core/errors/README": {
        "": [
            "arguments",
            "sharding",
            "steps",
            "ranks",
            "settings",
            "checkpoints",
            "optimizers",
            "compile",
            "plans",
        ]
    },
}
"""What pages lead to. It is here and not in the pages: a code host would show it as code."""

LISTED = {"fsdp2/_core/errors/README"}
"""Pages that show where they lead, down to headings: here, each code with its title."""

BUILDS_ON = {
    "step1_shard.py": "step0_plain.py",
    "step2_precision.py": "step1_shard.py",
    "step3_checkpoint.py": "step1_shard.py",
    "step4_tensor_parallel.py": "step1_shard.py",
    "step5_compile.py": "step1_shard.py",
}
"""Programs of the tutorial: what is new in each, over which, is marked on its page."""

FILE = re.compile(r"^<!-- file: (\S+) -->\n```python\n.*?^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(
    r'<picture>\s*<source media="[^"]*dark[^"]*" srcset="([^"]+)">'
    r'\s*<img src="([^"]+)" alt="([^"]+)">\s*</picture>'
)
ERROR = re.compile(r"^## (FS\d{3})\n\n\*\*(.+?)\.\*\*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s#]+)\)")


def prepare_page(app: object, name: str, source: list[str]) -> None:
    """Make of a page for a code host one for the site, and add the navigation.

    Of a link to a folder, which the site has not, the words are left. A picture in two colours,
    which the generator would not copy, becomes several, of which one is shown. A program that is a
    file has its new lines marked, which Markdown has no way to say.
    """
    folder = (ROOT / name).parent

    def without(link: re.Match[str]) -> str:
        leads_to_folder = "://" not in link[2] and (folder / link[2]).is_dir()
        return link[1] if leads_to_folder else link[0]

    def marked(block: re.Match[str]) -> str:
        path = folder / block[1]
        options = [":language: python"]
        if path.name in BUILDS_ON:
            options.append(f":emphasize-lines: {new_lines(path, BUILDS_ON[path.name])}")
        return "\n".join([f"```{{literalinclude}} {block[1]}", *options, "```"])

    def taken(picture: re.Match[str]) -> str:
        return as_images(folder, *picture.groups())

    source[0] = ERROR.sub(titled, source[0])
    source[0] = FILE.sub(marked, LINK.sub(without, PICTURE.sub(taken, source[0])))
    for caption, pages in NAVIGATION.get(name, {}).items():
        options = [":maxdepth: 2" if name in LISTED else ":hidden:", ":glob:"]
        options += [f":caption: {caption}"] if caption else []
        source[0] += "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def titled(error: re.Match[str]) -> str:
    """Return the heading of an error with its title, which lists and the search show then.

    In the file the heading is the code alone: links to it are the same here and on a code host.
    """
    title = " ".join(error[2].split())
    return f"{{#{error[1].lower()}}}\n## {error[1]}: {title}"


def as_images(folder: Path, dark: str, light: str, words: str) -> str:
    """Return images for dark and for light colours, and of a narrow window where these are there.

    Classes for colours are the theme's; `manual.css` has those for widths.
    """
    found = []
    for path, colours in ((dark, "dark"), (light, "light")):
        narrow = path.replace(f"-{colours}", f"-narrow-{colours}")
        widths = {path: " only-wide", narrow: " only-narrow"}
        if not (folder / narrow).is_file():
            widths = {path: ""}
        found += [
            f"```{{image}} {file}\n:class: only-{colours}{width}\n:alt: {words}\n```\n"
            for file, width in widths.items()
        ]
    return "\n".join(found)


def new_lines(path: Path, before: str) -> str:
    """Return the numbers of the lines of a program that the program before it has not."""
    old, new = (p.read_text().splitlines() for p in (path.with_name(before), path))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    found = [
        number + 1
        for kind, _, _, start, end in matcher.get_opcodes()
        if kind != "equal"
        for number in range(start, end)
        if new[number].strip()
    ]
    return ",".join(map(str, found))


def setup(app: object) -> None:
    app.connect("source-read", prepare_page)  # type: ignore[attr-defined]  # Sphinx's
