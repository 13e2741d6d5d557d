"""Runs a scenario: all servers stand side by side and sleep but the one under load."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ellm_sgl.client.process import ServerError, ServerProcess, stop_on_signals
from ellm_sgl.client.replay import Outcome, Request, replay, replay_to_end
from ellm_sgl.client.summary import summarize
from ellm_sgl.eval.compare.results import Comparison, Run
from ellm_sgl.eval.compare.scenario import AMPLE, ELLM, STOCK, Cell, Contender, Scenario

Progress = Callable[[str], None]
"""Told of each step, in one line."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""As for the demo: clients and tokenizers share the cores with the model."""
WARM_UP_TOKENS = 32
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_COUNTERS = ("sat_out_total", "recomputed_tokens_total", "fetched_units_total",
             "swap_stall_ms_total")  # fmt: skip


def compare(scenario: Scenario, say: Progress) -> Comparison:
    """Load every server with every cell, in `rounds` rounds, each in the reverse order of the one
    before. Never two servers under load at once.

    Each round has processes of its own: two of the same program differ, by up to a tenth of their
    speed, for as long as they live (docs/performance.md).

    Raises:
        ServerError: a server did not start, or went away.
        KeyboardInterrupt: asked to stop (by SIGTERM or SIGHUP too); no server is left.
    """
    contenders = scenario.contenders()
    runs: list[Run] = []
    with stop_on_signals():
        for number in range(scenario.rounds):
            with ExitStack() as stack:
                servers = {
                    c.name: stack.enter_context(_start(scenario, c, say)) for c in contenders
                }
                for cell in scenario.cells:
                    say(f"round {number + 1}/{scenario.rounds}, {cell.title}")
                    runs += _round(scenario, cell, number, contenders, servers, say)
    return Comparison(scenario, tuple(runs))


@contextmanager
def _start(scenario: Scenario, contender: Contender, say: Progress) -> Iterator[ServerProcess]:
    """A server that has served a few requests; stopped when the context is left."""
    say(f"starting {contender.name}")
    with ServerProcess(contender.arguments, ENVIRONMENT) as process:
        if contender.name.startswith(STOCK):
            say(f"{contender.name}: attention backend {process.attention_backend()}")
        replay(process.url, _warm_up(scenario))
        yield process


def _warm_up(scenario: Scenario) -> list[Request]:
    load = scenario.load(scenario.cells[0], seed=10_000)
    return [dataclasses.replace(r, at_s=0.0, output_tokens=WARM_UP_TOKENS) for r in load[:4]]


def _round(
    scenario: Scenario,
    cell: Cell,
    number: int,
    contenders: Sequence[Contender],
    servers: dict[str, ServerProcess],
    say: Progress,
) -> Iterator[Run]:
    """One cell on every server; ample memory comes first where the order is not reversed."""
    load = scenario.load(cell, seed=number)
    turns = [(c.name, c) for c in contenders]
    if ELLM in servers:
        turns.insert(0, (AMPLE, contenders[0]))
    done = []
    for name, contender in turns[:: -1 if number % 2 else 1]:
        server = servers[contender.name]
        if contender.name == ELLM:
            ample = name == AMPLE
            tokens = scenario.ample_tokens if ample else scenario.device_tokens
            server.adjust(ellm_device_kv_tokens=tokens)
        before = _counters(server, contender)
        outcomes = replay_to_end(server.url, load)
        if not server.alive():
            raise ServerError(f"{name} went away:\n{server.last_words()}")
        counted = {k: v - before[k] for k, v in _counters(server, contender).items()}
        server.flush_cache()
        done.append((name, contender, outcomes, counted))
        say(f"  {name}: {summarize(outcomes).tokens_per_s:.0f} tokens/s")
    expected = next((o for name, _, o, _ in done if name == AMPLE), None)
    for name, contender, outcomes, counted in done:
        yield _run(scenario, cell, number, (name, contender.baseline), outcomes, counted, expected)


def _run(
    scenario: Scenario,
    cell: Cell,
    number: int,
    server: tuple[str, bool],
    outcomes: Sequence[Outcome],
    counted: Mapping[str, float],
    expected: Sequence[Outcome] | None,
) -> Run:
    gaps = [float(np.diff(o.token_s).max()) for o in outcomes if len(o.token_s) > 1]
    times = np.sort(np.concatenate([o.token_s for o in outcomes]))
    in_time = [
        o.complete and o.ttft_s <= scenario.ttft_slo_s
        and (len(o.token_s) < 2 or o.tpot_s * 1e3 <= scenario.tpot_slo_ms)
        for o in outcomes
    ]  # fmt: skip
    alike = [
        a.output_ids == b.output_ids for a, b in zip(outcomes, expected or outcomes, strict=True)
    ]
    return Run(
        server=server[0],
        baseline=server[1],
        cell=cell,
        round=number,
        summary=summarize(outcomes),
        slo_attainment=float(np.mean(in_time)),
        longest_pause_s=max(gaps, default=0.0),
        preempted=int(counted["retracted"] + counted["sat_out_total"]),
        recomputed_tokens=int(counted["recomputed_tokens_total"]),
        fetched_units=int(counted["fetched_units_total"]),
        swap_stall_ms=counted["swap_stall_ms_total"],
        same_output=float(np.mean(alike)),
        tokens_at_s=tuple(times.tolist()),
    )


def _counters(server: ServerProcess, contender: Contender) -> dict[str, float]:
    """Totals so far. Stock SGLang tells of retractions in its log only."""
    log = server.log.read_text(errors="replace")
    retracted = float(sum(map(int, _RETRACTED.findall(log))))
    if contender.name.startswith(STOCK):
        return {"retracted": retracted, **dict.fromkeys(_COUNTERS, 0.0)}
    state: dict[str, Any] = server.state()
    return {"retracted": retracted, **{name: float(state[name]) for name in _COUNTERS}}
