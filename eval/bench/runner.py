"""Runs a scenario: servers started and warmed up, loads in turn, the order alternating.

On a machine whose speed drifts only figures taken close to each other can be compared: all settings
are measured in every round, every other round in reverse, and ratios are those within a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ellm_sgl.client.process import stop_on_signals
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Result, Sample, Taken
from ellm_sgl.eval.bench.scenario import Say, Scenario


def run(scenario: Scenario, say: Say, advance: Callable[[], None]) -> Result:
    """Measure every setting under every load in every round. Never two servers under load at once.

    Args:
        scenario: of 0 rounds, nothing is started.
        say: told of each step.
        advance: called after each measurement.

    Raises:
        ServerError: a server did not start, or went away.
        KeyboardInterrupt: asked to stop (by SIGTERM or SIGHUP too); no server is left.
    """
    rounds = range(scenario.rounds)
    numbers = [[number] for number in rounds] if scenario.anew else [list(rounds)]
    lives = list(itertools.product(filter(None, numbers), scenario.lives()))
    result = Result()
    with stop_on_signals():
        for life, cells in lives:
            with _started(scenario, say) as servers:
                for number in life:
                    new = _round(scenario, number, cells, servers, say, advance)
                    result = Result((*result.samples, *new))
                if (life, cells) == lives[-1]:
                    result = Result(result.samples, scenario.finish(servers, result, say))
    return result


@contextmanager
def _started(scenario: Scenario, say: Say) -> Iterator[dict[str, Any]]:
    """All servers, warmed up; stopped when the context is left."""
    with ExitStack() as stack:
        servers = {}
        for name, start in scenario.starters().items():
            say(f"starting {name}")
            servers[name] = stack.enter_context(start())
            scenario.warm_up(name, servers[name])
        yield servers


def _round(
    scenario: Scenario,
    number: int,
    cells: Sequence[Any],
    servers: Mapping[str, Any],
    say: Say,
    advance: Callable[[], None],
) -> Iterator[Sample]:
    first = scenario.columns[0]
    for cell in cells:
        say(f"round {number + 1}/{scenario.rounds} {scenario.title(cell)}".rstrip())
        load = scenario.load(cell, number)
        taken = {}
        for setting in scenario.settings()[:: -1 if number % 2 else 1]:
            found = scenario.measure(servers[setting.server], setting, load)
            taken[setting.name] = found
            value = first.text(found.figures[first.figure])
            say(f"  {setting.name}: {value} {first.heading}".replace("\n", " "))
            advance()
        yield from samples(taken, scenario.reference, cell, number)


def samples(
    taken: Mapping[str, Taken], reference: str | None, cell: Any, number: int
) -> Iterator[Sample]:
    """Of one load in one round, by setting. Where the reference was measured, with the figure
    `SAME_OUTPUT`."""
    for name, one in taken.items():
        figures = dict(one.figures)
        if reference is not None and reference in taken:
            right = taken[reference].outputs
            alike = [list(a) == list(b) for a, b in zip(one.outputs, right, strict=True)]
            figures[SAME_OUTPUT] = sum(alike) / max(len(alike), 1)
        yield Sample(cell, name, number, figures, one.detail)
