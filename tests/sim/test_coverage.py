"""Promise: branches tell which statements of the package a CPU cannot reach."""

from __future__ import annotations

from pathlib import Path

from tests.sim._coverage import device_only

SOURCE = """
def f(tensor, streams, flag):
    if tensor.is_cpu and flag:
        return "host, perhaps"
    if tensor.device.type != "cpu":
        first = "device"
    elif not streams.async_op or flag:
        second = "device, perhaps"
    if streams.async_op:
        return "host"
    third = 1 if tensor.is_cpu else 2
    for x in flag:
        fourth(
            x,
        )
"""


def test_statements_that_a_cpu_does_not_reach(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    found = [(each.first, each.text) for each in device_only(tmp_path)]
    assert found == [
        (6, 'first = "device"'),
        (11, "third = 1 if tensor.is_cpu else 2"),
        (12, "for x in flag:"),
        (13, "fourth( x, )"),
    ]
    assert not found_in_a_file_of_the_host(tmp_path)


def found_in_a_file_of_the_host(folder: Path) -> list[object]:
    (folder / "module.py").write_text("def f(x):\n    if x.is_cpu:\n        return 1\n")
    return [*device_only(folder)]


def test_a_statement_ran_if_one_of_its_lines_did() -> None:
    of_lanes = (s for s in device_only() if s.file == "_core/comm/device_streams.py")
    each = next(s for s in of_lanes if s.last > s.first)
    assert each.ran({(each.file, each.last)})
    assert not each.ran({(each.file, each.last + 1)})
