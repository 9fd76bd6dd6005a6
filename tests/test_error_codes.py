"""Promise: every message of the package ends with a code, and every code has a paragraph."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from fsdp2._core.base.paragraphs import FOLDER, read_paragraphs
from tests.lab import error_sites
from tests.lab.error_sites import sites

PARAGRAPHS = read_paragraphs()
PARTS = ("*How you get here.* ", "*What to do.* ")

HIGHEST = {"1": 103, "2": 234, "3": 330, "4": 409, "5": 516, "6": 636, "7": 718, "8": 808, "9": 919}
"""The last code of each family: it goes up with a new code, and never down."""

OF_OTHERS = {
    ("__init__.py", "AttributeError"): "Python's own words: a module without that name",
    (
        "_core/base/torch_modules.py",
        "AttributeError",
    ): "Python's own words: a class without that name",
    ("_core/pickles.py", "AttributeError"): "Python's own words: a module without that name",
    ("_core/base/policy.py", "FrozenInstanceError"): "the words of a frozen dataclass",
    ("_tools/plan/command.py", "ArgumentTypeError"): "a command line: its usage is printed with it",
    ("_tools/doctor/ranks.py", "LostRankError"): "becomes a verdict of the doctor",
    ("_tools/doctor/run.py", "ArgumentTypeError"): "a command line: its usage is printed with it",
    ("_core/agreement/agreement.py", "ReferenceError"): "becomes FS401",
    ("_core/engine/between_steps.py", "AttributeError"): "has FS910",
    ("_core/base/slot_clock.py", "ValueError"): "becomes FS618",
    ("_tools/record/bits_compared.py", "ValueError"): "becomes FS914",
    ("_tools/record/rows.py", "ValueError"): "becomes FS914",
    ("_tools/record/trace.py", "ValueError"): "becomes FS917",
    ("_tools/pages/page.py", "OSError"): "of the system, with the path that the user gave",
    ("_core/params/gradients.py", "RuntimeError"): "becomes FS319",
    ("_core/params/parts.py", "ValueError"): "becomes FS221",
    ("_core/base/regular_files.py", "OSError"): "becomes FS618, FS914 or FS917",
    ("checkpoint/_save.py", "TimeoutError"): "Python's own, for a wait that was given a limit",
    ("checkpoint/_checksums.py", "DamagedError"): "becomes FS618",
    ("checkpoint/_contents.py", "DamagedError"): "becomes FS618",
    ("checkpoint/_contents.py", "PicklingError"): "becomes FS403",
    ("checkpoint/_place.py", "OSError"): "caught where locks are tried",
    ("checkpoint/_files.py", "DamagedError"): "becomes FS618",
    ("checkpoint/_safetensors.py", "DamagedError"): "becomes FS618",
    ("checkpoint/_pickle_machine.py", "RefusedError"): "becomes FS616",
    ("checkpoint/_pickle_machine.py", "UnpicklingError"): "becomes FS618",
    ("checkpoint/_files.py", "OSError"): "becomes FS403",
    ("weights/_wire.py", "EOFError"): "becomes FS402",
    ("weights/_wire.py", "TimeoutError"): "becomes FS402",
    ("checkpoint/_torch_files.py", "DamagedError"): "becomes FS618",
    ("checkpoint/_torch_files.py", "RefusedError"): "becomes FS616",
    ("checkpoint/_torch_files.py", "UnpicklingError"): "becomes FS618",
}
"""What the package raises that is no FSDPError, and why a user does not meet it without a code."""


def test_every_message_has_a_code() -> None:
    missing = error_sites.faults()
    assert not missing, "\n" + "\n".join(map(str, missing))


def test_every_code_of_a_message_has_a_paragraph() -> None:
    known = {paragraph.code for paragraph in PARAGRAPHS if not paragraph.is_retired}
    missing = [f"{s.place}: {s.code}" for s in sites() if s.code is not None if s.code not in known]
    assert not missing, (
        "These codes have no paragraph, or a retired one, which is not used again. Write "
        f"`## FSnnn` into the file of its family in {FOLDER.name}, as its neighbours are "
        "(CONTRIBUTING.md, Errors):\n" + "\n".join(missing)
    )


def test_every_paragraph_has_a_message() -> None:
    used = {site.code for site in sites()}
    alone = [p.code for p in PARAGRAPHS if p.code not in used and not p.is_retired]
    assert not alone, (
        f"No message has the codes {alone} any more. Keep each heading, so that links of older "
        "versions lead there, and begin its title with `**Retired`, as in "
        "`**Retired: the mesh had no names.**`"
    )


def test_codes_are_never_given_twice() -> None:
    """A code that is gone leaves a gap, or lowers the last one of its family."""
    twice = [code for code, count in Counter(p.code for p in PARAGRAPHS).items() if count > 1]
    assert not twice, f"{twice} have two paragraphs: join them, or take the next free code"
    for family, highest in HIGHEST.items():
        numbers = [int(p.code[2:]) for p in PARAGRAPHS if p.code[2] == family]
        assert numbers == list(range(int(family) * 100 + 1, highest + 1)), (
            f"Family {family}xx is to have FS{family}01 to FS{highest}, without a gap. A code that "
            "no message has any more stays as a retired paragraph; for a new one, set HIGHEST in "
            "tests/test_error_codes.py to it"
        )
    assert {p.code[2] for p in PARAGRAPHS} == set(HIGHEST)


@pytest.mark.parametrize("paragraph", PARAGRAPHS, ids=lambda p: p.code)
def test_a_paragraph_says_what_it_means_how_one_gets_there_and_what_to_do(
    paragraph: object,
) -> None:
    assert isinstance(paragraph, type(PARAGRAPHS[0]))
    assert re.fullmatch(r"[A-Z`][^\n]*\.", paragraph.title), "a bold sentence of one line"
    if paragraph.is_retired:
        return
    parts = [part for part in paragraph.text.split("\n\n") if not part.startswith("```")]
    starts = [next((s for s in PARTS if part.startswith(s)), "") for part in parts]
    assert starts == ["", *PARTS], f"after the title: what it means, then {PARTS}"
    lines = max(len(line) for line in paragraph.text.splitlines())
    assert lines <= 100


def test_files_are_of_one_family_each() -> None:
    families: dict[str, set[str]] = {}
    for paragraph in PARAGRAPHS:
        families.setdefault(paragraph.file, set()).add(paragraph.code[2])
    assert all(len(family) == 1 for family in families.values()), families
    listed = set(re.findall(r"\((\w+\.md)\)", (FOLDER / "README.md").read_text(encoding="utf-8")))
    assert listed == set(families), "README.md of that folder has a link to each file"


def test_errors_of_others_are_known() -> None:
    """What is raised beside the error tree: each is caught here, or in words that are not ours."""
    found = error_sites.raised()
    assert found == set(OF_OTHERS), (
        "Raise an FSDPError with a code; if users never see this one, add it to OF_OTHERS in "
        f"tests/test_error_codes.py with the reason: {sorted(found ^ set(OF_OTHERS))}"
    )
