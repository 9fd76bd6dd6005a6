"""``read_recordings`` and ``Recordings``: the recordings of all ranks, on one clock."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp2._core.base.errors import ConfigError, check_count, check_path, wrong_type
from fsdp2._tools.pages.content import Page, Planned
from fsdp2._tools.pages.page import render
from fsdp2._tools.record import bounds, summary, trace
from fsdp2._tools.record.align import Aligned, Arrivals, ClockOffset, align
from fsdp2._tools.record.rows import RankFile, files_in, read_file, write_beside


def read_recordings(*paths: str | os.PathLike[str]) -> Recordings:
    """Read folders or single files that ``fsdp2.record`` wrote on any number of ranks.

    Recordings of a run that is still running, or has crashed, can be read. Pass files of one run.

    Raises:
        ConfigError: there is nothing to read, a file is not a recording, or a rank appears twice.
    """
    if not paths:
        raise ConfigError(
            "FS914",
            "read_recordings: expected folders that fsdp2.record wrote, found none. Pass the "
            "path that was passed to record.",
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
    """Recordings of some or all ranks of a run. Created by ``read_recordings``.

    ``ranks`` are the recorded ranks. ``clocks`` has a ``ClockOffset`` for each rank. ``arrivals``
    has an ``Arrivals`` for each rank, with the worst rank first. ``stragglers`` has the
    ``Arrivals`` of the ranks that other ranks wait for.
    """

    def __init__(self, files: tuple[RankFile, ...]) -> None:
        self._files = files

    def __repr__(self) -> str:
        counts = tuple(len(steps) for steps in self.steps.values())
        return f"Recordings(ranks={self.ranks}, steps={counts})"

    def __str__(self) -> str:
        """Return the bottleneck of the steps and the recommended changes, as text."""
        found = bounds.find_bounds(self._aligned)
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

    @property
    def arrivals(self) -> tuple[Arrivals, ...]:
        return self._aligned.arrivals

    @property
    def stragglers(self) -> tuple[Arrivals, ...]:
        return bounds.stragglers(self._aligned)

    @property
    def steps(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """Figures of each rank's complete steps, as dicts keyed by the names of ``RecordedStep``.

        Each dict also contains the step's number (``step``), ``begin_ns`` and ``end_ns``.
        """
        return {file.rank: file.steps for file in self._files}

    def _paths(self) -> list[Path]:
        return [file.path for file in self._files]

    @property
    def _start(self) -> int:
        return min(self._aligned.time(file.rank, file.header["epoch_ns"]) for file in self._files)

    def trace(
        self, path: str | os.PathLike[str], *, profiles: Mapping[int, Any] | Sequence[Any] = ()
    ) -> None:
        """Write one trace of all ranks, for https://ui.perfetto.dev and chrome://tracing.

        Args:
            path: a file, which is replaced if it exists.
            profiles: paths of ``torch.profiler`` traces to merge. If the files do not contain
                their ranks, pass a dict from ranks to paths.

        Raises:
            ConfigError: a path cannot be used; a file is not a profile, or its rank is unknown.
        """
        target = Path(check_path("trace", "path", path))
        base = self._start

        def time(rank: int, epoch_ns: int) -> float:
            return (self._aligned.time(rank, epoch_ns) - base) / 1e3

        events = [event for file in self._files for event in trace.events_of(file, time)]
        for rank, profile in self._profiles(profiles):
            events += trace.merged(profile, rank, time)
        found = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": events}
        write_beside(target, json.dumps(found), self._paths(), "trace")

    def _profiles(self, given: object) -> list[tuple[int, dict[str, Any]]]:
        is_path = isinstance(given, str | bytes | os.PathLike)
        if is_path or not isinstance(given, Mapping | Sequence):
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
                    f"trace: the rank of profile {path} is unknown (found {own!r}). Pass "
                    "profiles as a dict from ranks to paths.",
                )
            found.append((own, profile))
        return found

    def rows(self, path: str | os.PathLike[str]) -> None:
        """Write the rows of all ranks, on one clock, as JSON lines, which pandas can read.

        Each row has its ``rank``, and times in nanoseconds since the first recording began.

        Args:
            path: the file, which is replaced if it exists.

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
                    name: self._aligned.time(file.rank, epoch + value) - base
                    for name, value in row.items()
                    if name in ("begin_ns", "end_ns", "host_ns") and value is not None
                }
                lines.append(json.dumps({"rank": file.rank, **row, **moved}) + "\n")
        write_beside(target, "".join(lines), self._paths(), "rows")

    def page(
        self,
        *,
        step: int | None = None,
        planned: Planned | None = None,
    ) -> Page:
        """Return the contents of the ``html`` page as plain values, for other programs to draw.

        Args:
            step: the step whose timeline and memory are shown; by default, the last complete step.
            planned: the result of ``Plan.planned()``, to be drawn over the measurements.

        Raises:
            ConfigError: there is no such step; ``planned`` has another type.
        """
        if step is not None:
            check_count("page", "step", step)
        shown = summary.choose_step(self._files, step)
        if planned is not None and not isinstance(planned, Planned):
            raise wrong_type("page", "planned", "a result of Plan.planned(), or None", planned)
        return summary.page(self._aligned, shown, planned)

    def html(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        planned: Planned | None = None,
    ) -> None:
        """Write a page that shows the recordings: one file that needs no server and no network.

        The file is written completely or not at all. Call ``html`` on one rank only, because ranks
        that write to the same path replace each other's page.

        Args:
            path: the file, which is replaced if it exists.
            step: as for ``page``.
            planned: as for ``page``.

        Raises:
            ConfigError: as for ``page``; the path cannot be written, or is one of the recordings.
        """
        target = Path(check_path("html", "path", path))
        text = render(self.page(step=step, planned=planned))
        write_beside(target, text, self._paths(), "html")
