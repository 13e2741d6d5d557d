"""Many lives: one seed is one life, always the same."""

from __future__ import annotations

import logging
import random
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.simulation import configuration as configurations
from tests.simulation import stories
from tests.simulation.configuration import Configuration
from tests.simulation.events import Event
from tests.simulation.life import live
from tests.simulation.shrink import as_test, shrink


@dataclass(frozen=True)
class Found:
    """A life that failed."""

    seed: int
    error: str
    """Its last line."""
    trace: str
    configuration: Configuration
    story: Sequence[Event]

    @property
    def kind(self) -> str:
        return self.error.split(":")[0]

    def report(self, seconds: float = 30.0) -> str:
        """What to read: the error, and the life as a test to paste, shrunk for so long."""
        small = shrink(self.configuration, self.story, self._alike, seconds)
        error = failure(*small) or self
        test = as_test(f"found_by_seed_{self.seed}", error.error, *small)
        return f"seed {self.seed}: {self.error}\n\n{error.trace}\n{test}"

    def _alike(self, configuration: Configuration, story: Sequence[Event]) -> bool:
        found = failure(configuration, story)
        return found is not None and found.kind == self.kind


def life_of(seed: int) -> tuple[Configuration, list[Event]]:
    rng = random.Random(seed)
    configuration = configurations.draw(rng)
    return configuration, stories.draw(rng, configuration)


def failure(
    configuration: Configuration,
    story: Sequence[Event],
    seed: int = -1,
    totals: Counter[str] | None = None,
) -> Found | None:
    """Live it; what went wrong, if anything did.

    Args:
        totals: what the life came by is added to these.
    """
    try:
        with quiet():
            came_by = live(configuration, story)
    except Exception as error:  # whatever it is: a scheduler would have ended
        last = traceback.format_exception_only(error)[-1].strip()
        trace = "".join(traceback.format_tb(error.__traceback__)[-6:])
        return Found(seed, last, trace, configuration, story)
    if totals is not None:
        totals += came_by
        totals["lives"] += 1
    return None


def run(seeds: Iterable[int], totals: Counter[str] | None = None) -> Iterator[Found | None]:
    """One life after the other."""
    for seed in seeds:
        yield failure(*life_of(seed), seed, totals)


def first_found(seeds: Iterable[int]) -> Found | None:
    """The first life that fails."""
    return next((found for found in run(seeds) if found is not None), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Without SGLang's and our own log: lives retract, refuse and fail all the time."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
