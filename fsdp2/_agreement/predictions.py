"""What follows what in a program that repeats itself, learned from what it did.

Owns the guesses, which are the same on all ranks as long as what the ranks did is. Operations are
numbers here. See [Note: agreement] in ``agreement``.
"""

from __future__ import annotations

from collections.abc import Iterator

CONTEXT = 4
"""How many operations a prediction looks back."""

LONG_RUN = 3
"""What followed this often in a row is expected again."""

MAX_RUN = 4096
"""How often in a row the same thing followed, as far as that is counted."""

MAX_PREDICTIONS = 100_000
UNCERTAIN = -1

DOUBTED = 1 - LONG_RUN
"""How much a turn is trusted that was another one this time: from 1 on it is expected."""

Recent = tuple[int, ...]  # the last operations, the newest one at the end
Runs = dict[Recent, tuple[int, int]]  # where several things followed: the last one, how often

_NO_RUN = (UNCERTAIN, 0)


class Predictions:
    """What comes next, by the last operations.

    Where different things followed these, what counts besides is which one did last, and how often
    in a row: so the last of several microbatches, which is synchronised, is told from the others.
    A turn that was once another one (an evaluation in between) is expected again when it has come
    ``LONG_RUN`` times in a row.
    """

    def __init__(self) -> None:
        self.first: dict[Recent, int] = {}  # by the last operations alone
        self._turns: dict[tuple[Recent, int, int], tuple[int, int]] = {}  # what came, and its trust
        self._runs: Runs = {}

    def expect(self, recent: Recent) -> int | None:
        """Return the number of what comes next, UNCERTAIN, or None: that was never seen."""
        return self._expect(recent, self._runs)

    def _expect(self, recent: Recent, runs: Runs) -> int | None:
        predicted = self.first.get(recent)
        if predicted != UNCERTAIN:
            return predicted
        last, length = runs.get(recent, _NO_RUN)
        number, trust = self._turns.get((recent, last, length), (last, length - LONG_RUN + 1))
        return number if trust > 0 else None

    def learn(self, recent: Recent, number: int) -> None:
        """Note what came next."""
        if len(self.first) + len(self._turns) >= MAX_PREDICTIONS:
            self.clear()
        known = self.first.get(recent)
        if known is None or known == number:
            self.first[recent] = number
            return
        if known == UNCERTAIN:
            last, length = self._runs.get(recent, _NO_RUN)
            turn = self._turns.get((recent, last, length))
            if turn is not None or number != last or length < LONG_RUN:
                trust = 1
                if turn is not None:
                    trust = min(turn[1] + 1, 1) if turn[0] == number else DOUBTED
                self._turns[recent, last, length] = number, trust
        else:
            self.first[recent] = UNCERTAIN
        _count(self._runs, recent, number)

    def after(self, recent: Recent) -> Iterator[int | None]:
        """Yield what comes next if all goes on as predicted; None where nothing is, at the end."""
        runs = dict(self._runs)
        while True:
            predicted = self._expect(recent, runs)
            if predicted is None or predicted == UNCERTAIN:
                yield None
                return
            yield predicted
            if self.first.get(recent) == UNCERTAIN:
                _count(runs, recent, predicted)
            recent = (*recent[1:], predicted)

    def forget(self, number: int) -> None:
        """Never expect an operation again."""
        for recent in [recent for recent, known in self.first.items() if known == number]:
            del self.first[recent]
        for turn in [turn for turn, (known, _) in self._turns.items() if known == number]:
            del self._turns[turn]

    @property
    def numbers(self) -> set[int]:
        """The numbers of all that was learned."""
        runs = {last for last, _ in self._runs.values()}
        turns = {number for number, _ in self._turns.values()}
        return {*self.first.values(), *turns, *runs} - {UNCERTAIN}

    def clear(self) -> None:
        """Forget everything."""
        self.first.clear()
        self._turns.clear()
        self._runs.clear()


def _count(runs: Runs, recent: Recent, number: int) -> None:
    last, length = runs.get(recent, _NO_RUN)
    runs[recent] = (number, min(length + 1, MAX_RUN) if last == number else 1)
