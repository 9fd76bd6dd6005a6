"""``read_recordings`` and ``Recordings``: what all ranks recorded, on one clock.

Owns what a user does with files afterwards. It must not know how they came to be.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp2._core.base.arguments import check_count, check_path, wrong_type
from fsdp2._core.base.errors import ConfigError
from fsdp2._tools.pages.content import Page, Planned
from fsdp2._tools.pages.page import render
from fsdp2._tools.record import bounds, summary, trace
from fsdp2._tools.record.align import Aligned, Arrivals, ClockOffset, align, arrivals
from fsdp2._tools.record.rows import RankFile, files_in, read_file, write_beside


def read_recordings(*paths: str | os.PathLike[str]) -> Recordings:
    """Read what ``fsdp2.record`` wrote: folders, or single files, of any number of ranks.

    Recordings of a run that goes on, or died, can be read too. All files must be of one run.

    Raises:
        ConfigError: there is nothing to read, it is something else, or a rank is there twice.
    """
    if not paths:
        raise ConfigError(
            "FS914",
            "read_recordings: expected folders that fsdp2.record wrote, found none. Pass what "
            "record was given as path.",
        )
    folders = [Path(check_path("read_recordings", "paths", path)) for path in paths]
    files = sorted((read_file(path) for path in files_in(folders)), key=lambda file: file.rank)
    for one, other in itertools.pairwise(files):
        if one.rank == other.rank:
            raise ConfigError(
                "FS914",
                f"read_recordings: found rank {one.rank} twice, in {one.path} and {other.path}. "
                "Pass folders of one run only.",
            )
    return Recordings(tuple(files))


class Recordings:
    """Recordings of some or all ranks of a run. ``read_recordings`` makes it.

    ``ranks`` says of which ranks. ``clocks`` has a ``ClockOffset`` for each rank. ``arrivals`` has
    an ``Arrivals`` for each rank, the worst first. ``stragglers`` has those of the ranks that the
    others wait for.
    """

    def __init__(self, files: tuple[RankFile, ...]) -> None:
        self._files = files

    def __repr__(self) -> str:
        counts = tuple(len(steps) for steps in self.steps.values())
        return f"Recordings(ranks={self.ranks}, steps={counts})"

    def __str__(self) -> str:
        """Say what bounds the steps, and what to change."""
        found = bounds.find_bounds(self._files, self._aligned, self.arrivals)
        changes: dict[str, list[str]] = {}
        for one in found.advice:
            changes.setdefault(one.change, []).append(one.about)
        lines = [f"  {', '.join(about)}: {change}" for change, about in changes.items()]
        return "\n".join([repr(self), found.headline.text, *lines])

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(file.rank for file in self._files)

    @functools.cached_property
    def _aligned(self) -> Aligned:
        return align(self._files)

    @property
    def clocks(self) -> tuple[ClockOffset, ...]:
        return self._aligned.clocks

    @functools.cached_property
    def arrivals(self) -> tuple[Arrivals, ...]:
        return arrivals(self._aligned)

    @property
    def stragglers(self) -> tuple[Arrivals, ...]:
        return bounds.stragglers(self._files, self.arrivals)

    @property
    def steps(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """The figures of each complete step by rank, as dicts with the names of ``RecordedStep``.

        A dict has the number of the step as ``step``, and its ``begin_ns`` and ``end_ns``.
        """
        return {
            file.rank: tuple(
                row for row in file.rows if row["kind"] == "step" and not row["failed"]
            )
            for file in self._files
        }

    def _paths(self) -> list[Path]:
        return [file.path for file in self._files]

    def _time(self, rank: int, epoch_ns: int) -> int:
        """Return a rank's time on the clock of the first rank."""
        shift = self._aligned.shifts.get(rank)
        return epoch_ns if shift is None else shift.apply(epoch_ns)

    @property
    def _start(self) -> int:
        """When the first recording began."""
        return min(self._time(file.rank, file.header["epoch_ns"]) for file in self._files)

    def trace(
        self,
        path: str | os.PathLike[str],
        *,
        profiles: Mapping[int, Any] | Sequence[Any] = (),
    ) -> None:
        """Write one trace of all ranks, for https://ui.perfetto.dev and chrome://tracing.

        Args:
            path: a file, which is replaced if it is there.
            profiles: traces that ``torch.profiler`` exported, to be merged: paths, or a dict of
                them by rank, where the file does not say its rank.

        Raises:
            ConfigError: a path cannot be used; a profile is none, or its rank is not known.
        """
        target = Path(check_path("trace", "path", path))
        base = self._start

        def time(rank: int, epoch_ns: int) -> float:
            return (self._time(rank, epoch_ns) - base) / 1e3

        events = [event for file in self._files for event in trace.events_of(file, time)]
        for rank, profile in self._profiles(profiles):
            events += trace.merged(profile, rank, time)
        found = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": events}
        write_beside(target, json.dumps(found), self._paths(), "trace")

    def _profiles(self, given: object) -> list[tuple[int, dict[str, Any]]]:
        if isinstance(given, str | bytes | os.PathLike) or not isinstance(
            given, Mapping | Sequence
        ):
            raise wrong_type("trace", "profiles", "a list of paths, or a dict by rank", given)
        pairs = given.items() if isinstance(given, Mapping) else [(None, path) for path in given]
        found = []
        for rank, path in pairs:
            profile = trace.read_profile(Path(check_path("trace", "profiles", path)))
            own = trace.rank_of_profile(profile) if rank is None else rank
            if own is None and len(self._files) == 1:
                own = self._files[0].rank
            if not isinstance(own, int) or isinstance(own, bool) or not 0 <= own < trace.FOREIGN:
                raise ConfigError(
                    "FS917",
                    f"trace: the rank of profile {path} is not known (found {own!r}). Pass "
                    "profiles as a dict from ranks to paths.",
                )
            found.append((own, profile))
        return found

    def rows(self, path: str | os.PathLike[str]) -> None:
        """Write the rows of all ranks as JSON lines, on one clock, as pandas reads them.

        Each row has its ``rank``, and times in nanoseconds since the first recording began.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            ConfigError: the path cannot be written, or is one of the recordings.
        """
        target = Path(check_path("rows", "path", path))
        base = self._start
        lines = []
        for file in self._files:
            epoch = file.header["epoch_ns"]
            for row in file.rows:
                moved = {
                    name: self._time(file.rank, epoch + value) - base
                    for name, value in row.items()
                    if name in ("begin_ns", "end_ns", "host_ns") and value is not None
                }
                lines.append(json.dumps({"rank": file.rank, **row, **moved}) + "\n")
        write_beside(target, "".join(lines), self._paths(), "rows")

    def page(self, *, step: int | None = None, planned: Planned | None = None) -> Page:
        """Return what ``html`` shows, as plain values. For programs that draw it in another way.

        Args:
            step: whose time line and memory are shown; default: the last complete one.
            planned: what ``Plan.planned()`` returned, to be laid over what was measured.

        Raises:
            ConfigError: there is no such step; ``planned`` is something else.
        """
        if step is not None:
            check_count("page", "step", step)
        shown = summary.choose_step(self._files, step)
        return summary.page(self._files, self._aligned, self.arrivals, shown, _checked(planned))

    def html(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        planned: Planned | None = None,
    ) -> None:
        """Write a page that shows the recordings: one file that needs no server and no network.

        It is written whole or not at all. Let one rank write it: ranks that write to one path
        replace each other's page.

        Args:
            path: of the file; one that is there is replaced.
            step: as for ``page``.
            planned: as for ``page``.

        Raises:
            ConfigError: as ``page``; the path cannot be written, or is one of the recordings.
        """
        target = Path(check_path("html", "path", path))
        text = render(self.page(step=step, planned=planned))
        write_beside(target, text, self._paths(), "html")


def _checked(planned: object) -> Planned | None:
    if planned is not None and not isinstance(planned, Planned):
        raise wrong_type("page", "planned", "what Plan.planned() returned, or None", planned)
    return planned
