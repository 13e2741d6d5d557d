"""How long a pool takes to shrink and to grow while it serves, and what that does to streams.

From the request (`ellm_device_kv_tokens`) to what Linux says that the process has, by 1 GiB. Warm:
memory that was given back just before; cold: after a while in which a virtual machine may have lost
what it did not use. Half in use: idle prefixes below, streams above, whose KV has to move; else all
that goes is free. Never resized: a server that may grow, shares a budget and gives memory back when
idle, beside one that does none of it, by turns.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from ellm_sgl.budget import path_of
from ellm_sgl.client.process import DEMO_ARGUMENTS, DEMO_MODEL, ServerProcess
from ellm_sgl.client.resident import Resident
from ellm_sgl.config.click_types import SECONDS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.resizing import LONGEST_S, Change, Pool
from ellm_sgl.eval.bench.result import Column, MeasurementError, Ratio, Result, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, model_option, option, rounds_option
from ellm_sgl.eval.bench.streams import Streams
from ellm_sgl.eval.simulator.machines import read_model

GIB, MIB = 1 << 30, 1 << 20
WHEN = ("before", "meanwhile")
PROMPT_TOKENS, LONG_TOKENS, PAIR_TOKENS = 64, 2000, 96
LONGEST_OUTPUT = 4096
"""Of streams, that are given up before."""
STEPS = 1000
PAUSE_S = 0.5
"""Between two changes: so long steps are undisturbed."""
WAYS = {**dict.fromkeys(("shrink, idle", "shrink, decoding", "shrink, half in use", "grow, warm",
                         "grow, cold", "1,000 steps"), "server"),
        "idle": "idle", "never resized": "pair"}  # fmt: skip
"""Measurements, and what each is taken on."""
Pair = tuple[ServerProcess, ServerProcess]
Start = Callable[[], ServerProcess]
_TURNS = itertools.count()


class Told(Column):
    """Nothing where a setting does not have that figure."""

    def show(self, result: Result, cell: Any, setting: str, other: str | None) -> str:
        samples = result.of(cell, setting)
        known = [s for s in samples if self.figure in s.figures]
        return super().show(result, cell, setting, other) if known == samples else ""


@dataclass(frozen=True)
class Resize(Scenario):
    rounds: int = rounds_option(4)
    model_path: str = model_option()
    streams: int = option(4, click.IntRange(1, 64), "That decode meanwhile.")
    changes: int = option(4, click.IntRange(1, 1000), "Warm ones in a row.")
    cold_s: float = option(20.0, SECONDS, "Until what is not used is cold.")
    idle_s: int = option(5, click.IntRange(1, 3600), "Until an idle server gives memory back.")
    pairs: int = option(8, click.IntRange(1, 1000), "Of the last measurement, in a round.")

    only: tuple[str, ...] = option(
        (), click.Choice(list(WAYS)), "Only these.", flag="--measure", multiple=True
    )

    anew = True
    columns = (Column("ms", "seconds", "{:,.1f}", 1e3), Told("slowest", "slowest", "{:,.1f}", 1e3),
               Told("step ms", "step_s", "{:.1f}", 1e3),
               Told("longest pause,\nsteps", "pause_steps", "{:.1f}"),
               Told("p99 of steps,\nof before", "p99_of_before", "{:.2f}"),
               Told("retractions", "retractions"), Told("faults in\nthe pool", "pool_faults"),
               Told("resident, of\ncommitted", "resident_of_committed", "{:.3f}"),
               Told("MiB left\nbehind", "left_mib"),
               Told("tokens/s\nof fixed", "of_fixed", "{:.3f}"))  # fmt: skip

    @property
    def gib(self) -> int:
        """Tokens whose KV takes 1 GiB."""
        shape = read_model(Path(self.model_path) / "config.json")
        return GIB // shape.in_elements_of(4).kv_bytes_per_token

    @property
    def _ways(self) -> Mapping[str, Callable[[Any], Taken]]:
        """How each measurement is taken."""
        return {
            "shrink, idle": self._shrink_idle,
            "shrink, decoding": lambda s: self._in_turn(Pool(s), shrinks=True),
            "shrink, half in use": self._shrink_in_use,
            "grow, warm": lambda s: self._in_turn(Pool(s), shrinks=False),
            "grow, cold": self._grow_cold,
            "1,000 steps": self._steps,
            "idle": self._idle,
            "never resized": self._pair,
        }

    def starters(self) -> Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]]:
        own = Path(self.model_path) == DEMO_MODEL
        model = DEMO_ARGUMENTS if own else loads.bare_model(self.model_path)
        policy, flag = ("--ellm-policy", "fcfs"), "--ellm-device-kv-tokens"
        most = ("--ellm-max-device-kv-tokens", 2 * self.gib)
        idle = ("--ellm-idle-release-s", self.idle_s, "--ellm-idle-keep-prefixes", "off")
        floor = ("--ellm-min-device-kv-tokens", self._least)
        fixed = (*policy, flag, self.gib // 4)
        budget = f"bench-{os.getpid()}"
        elastic = (*fixed, *most, "--ellm-memory-budget", f"{budget}:2GiB",
                   "--ellm-idle-release-s", 3600)  # fmt: skip
        starters: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
            "server": loads.starter(*policy, flag, self._least, *most, model=model),
            "idle": loads.starter(*policy, flag, self.gib, *idle, *floor, model=model),
            "pair": lambda: _both(
                loads.starter(*elastic, model=model), loads.starter(*fixed, model=model), budget
            ),
        }
        needed = {setting.server for setting in self.settings()}
        return {name: start for name, start in starters.items() if name in needed}

    def settings(self) -> list[Setting]:
        wanted = self.only or WAYS
        return [Setting(n, WAYS[n], way) for n, way in self._ways.items() if n in wanted]

    def load(self, cell: str, seed: int) -> None:
        """Each measurement has its own."""

    def measure(self, server: Any, setting: Setting, load: None) -> Taken:
        taken: Taken = setting.value(server)
        return taken

    def warm_up(self, name: str, server: Any) -> None:
        """As far as loads use it; what a pool always keeps takes memory as it is first written."""
        if isinstance(server, tuple):
            for one in (*server, *server):
                loads.generate(one, self._pairs_load(), PAIR_TOKENS)
        else:
            loads.generate(server, self._prompts(self._least // LONG_TOKENS + 1, LONG_TOKENS), 64)

    # -- on one server ------------------------------------------------------------------------

    @property
    def _least(self) -> int:
        """Tokens of the pool when it is small: room for all streams, none of which has to pause."""
        return max(self.gib // 64, 2 * self.streams * (PROMPT_TOKENS + LONGEST_OUTPUT))

    def _prompts(self, count: int, tokens: int = PROMPT_TOKENS) -> loads.Prompts:
        return loads.draw_prompts(time.perf_counter(), count, tokens)

    def _streams(self, server: ServerProcess) -> Streams:
        return Streams(server, self._prompts(self.streams), LONGEST_OUTPUT)

    def _emptied(self, pool: Pool, tokens: int) -> None:
        """Bring a pool without prefixes to so many tokens, all of which have been written to."""
        pool.server.flush_cache()
        if pool.tokens > self._least:
            pool.change(self._least)
        pool.change(tokens)

    def _shrink_idle(self, server: ServerProcess) -> Taken:
        pool, taken = Pool(server), []
        for _ in range(self.changes):
            self._emptied(pool, self._least + self.gib)
            taken.append(pool.change(self._least))
        return Taken(_times(taken))

    def _in_turn(self, pool: Pool, shrinks: bool) -> Taken:
        """Grow and shrink by turns while streams decode; the figures are those of the one or of
        the other."""
        self._emptied(pool, self._least + self.gib)
        retracted = loads.totals(pool.server)["retractions"]
        shrunk, grown = [], []
        with self._streams(pool.server) as streams:
            time.sleep(2 * PAUSE_S)
            began = time.perf_counter()
            time.sleep(self.changes * PAUSE_S)
            for _ in range(self.changes):
                shrunk.append(pool.change(self._least))
                time.sleep(PAUSE_S)
                grown.append(pool.change(self._least + self.gib))
                time.sleep(PAUSE_S)
        taken = shrunk if shrinks else grown
        found = _paused(streams, (began, shrunk[0].begin), taken)
        retracted = loads.totals(pool.server)["retractions"] - retracted
        return Taken({**_times(taken), **found.figures, "retractions": retracted}, (), found.detail)

    def _grow_cold(self, server: ServerProcess) -> Taken:
        pool = Pool(server)
        self._emptied(pool, self._least + self.gib)
        pool.change(self._least)
        time.sleep(self.cold_s)
        with self._streams(server) as streams:
            time.sleep(2 * PAUSE_S)
            began = time.perf_counter()
            time.sleep(4 * PAUSE_S)
            grown = pool.change(self._least + self.gib)
            time.sleep(PAUSE_S)
        found = _paused(streams, (began, grown.begin), [grown])
        return Taken({**_times([grown]), **found.figures}, (), found.detail)

    def _shrink_in_use(self, server: ServerProcess) -> Taken:
        """From 1.5 GiB to half of one, which streams use nearly all; before, they had it where it
        is to be given back, and cached prefixes had the rest of what is in use."""
        pool, half = Pool(server), self.gib // 2
        self._emptied(pool, half + self.gib)
        loads.generate(server, self._prompts(half // LONG_TOKENS, LONG_TOKENS), 1)
        prompts = self._prompts(round(0.94 * half / LONG_TOKENS), LONG_TOKENS)
        before = loads.totals(server)
        with Streams(server, prompts, LONGEST_OUTPUT) as streams:
            began = time.perf_counter()
            time.sleep(4 * PAUSE_S)
            shrunk = pool.change(half)
            time.sleep(PAUSE_S)
        since = loads.since(server, before)
        if not since["relocated_units"]:
            raise MeasurementError("nothing had to move: the streams had low units already")
        found = _paused(streams, (began, shrunk.begin), [shrunk])
        figures = {name: since[name] for name in ("retractions", "relocated_units")}
        return Taken({**_times([shrunk]), **found.figures, **figures}, (), found.detail)

    def _steps(self, server: ServerProcess) -> Taken:
        pool = Pool(server)
        self._emptied(pool, self._least + self.gib)
        taken, low = pool.resident, pool.held()
        faults = taken.faults()
        seconds = loads.generate(server, self._prompts(self.streams), STEPS).figures["seconds"]
        faults, high = taken.faults() - faults, pool.held()
        return Taken({
            "seconds": seconds, "step_s": seconds / STEPS, "faults": faults,
            "pool_faults": (high - low) // mmap.PAGESIZE,
            "resident_of_committed": high / pool.committed(),
        })  # fmt: skip

    def _idle(self, server: ServerProcess) -> Taken:
        """From the last token on."""
        resident = Resident(server.pid)
        _rested(server, self._least)
        before = resident.bytes()
        loads.generate(server, self._prompts(self.gib // 4 // LONG_TOKENS, LONG_TOKENS), 8)
        ended, loaded = time.perf_counter(), resident.bytes()
        _rested(server, self._least)
        seconds = time.perf_counter() - ended
        left = (resident.bytes() - before) / MIB
        return Taken({"seconds": seconds, "left_mib": left, "loaded_mib": (loaded - before) / MIB})

    # -- on two -------------------------------------------------------------------------------

    def _pairs_load(self) -> loads.Prompts:
        return self._prompts(24, 2 * PROMPT_TOKENS)

    def _pair(self, pair: Pair) -> Taken:
        seconds, ratios = 0.0, []
        for number in range(self.pairs):
            prompts, tokens = self._pairs_load(), {}
            for server in pair[:: -1 if number % 2 else 1]:
                server.flush_cache()
                found = loads.generate(server, prompts, PAIR_TOKENS).figures
                tokens[server.port] = found["tokens_per_s"]
                seconds += found["seconds"]
            elastic, fixed = (tokens[server.port] for server in pair)
            ratios.append(elastic / fixed)
        return Taken({"seconds": seconds, "of_fixed": statistics.median(ratios)}, (), ratios)

    def notes(self, result: Result) -> list[str]:
        """Over all rounds together."""
        rounds = [s.figures["of_fixed"] for s in result.of("", "never resized")]
        told = []
        if rounds:  # two processes of one program differ for as long as they live
            found = Ratio.of(in_either_order(rounds))
            interval = found.interval or (found.median, found.median)
            told.append(
                f"never resized, {len(rounds)} pairs of servers, {self.pairs} loads each, two "
                f"pairs together that are started in either order: {found.median:.3f} of the "
                f"tokens/s of fixed [{interval[0]:.3f}, {interval[1]:.3f}]"
            )
        for name in self._ways:
            gaps = [s.detail for s in result.of("", name) if isinstance(s.detail, dict)]
            if gaps:
                before, meanwhile = ([g for d in gaps for g in d[w]] for w in WHEN)
                told.append(
                    f"{name}: p99 of {len(meanwhile):,} token gaps meanwhile "
                    f"{p99(meanwhile) * 1e3:.1f} ms, of {len(before):,} before "
                    f"{p99(before) * 1e3:.1f} ms ({p99(meanwhile) / p99(before):.2f})"
                )
        return told


def in_either_order(rounds: Sequence[float]) -> list[float]:
    """Ratios of two servers, of which another is started first in every other round: who is first
    is slower by some percent. The geometric means of two rounds each, a last one by itself."""
    return [statistics.geometric_mean(rounds[i : i + 2]) for i in range(0, len(rounds), 2)]


def _times(taken: Sequence[Change]) -> dict[str, float]:
    seconds = [change.seconds for change in taken]
    return {"seconds": statistics.median(seconds), "slowest": max(seconds)}


def _paused(streams: Streams, quiet: tuple[float, float], taken: Sequence[Change]) -> Taken:
    """What streams saw meanwhile, beside what they saw before, in an undisturbed span."""
    before = streams.gaps(*quiet, whole=True)
    if not before:
        raise MeasurementError("no step was over before the pool changed: is the machine busy?")
    meanwhile = [gap for change in taken for gap in streams.gaps(change.begin, change.end)]
    step = statistics.median(before)
    figures = {
        "step_s": step,
        "pause_steps": max(meanwhile) / step,
        "p99_of_before": p99(meanwhile) / p99(before),
    }
    return Taken(figures, (), dict(zip(WHEN, (before, meanwhile), strict=True)))


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def _rested(server: ServerProcess, tokens: int) -> None:
    """Wait until an idle server has given its memory back, but for so many tokens'."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        resize = server.state(integrity=False)["resize"]
        if resize["wanted_tokens"] <= tokens and resize["outcome"] == "applied":
            return
        if time.monotonic() > deadline:
            raise MeasurementError(f"an idle server keeps its memory: {resize}")
        time.sleep(0.01)


@contextlib.contextmanager
def _both(one: Start, other: Start, budget: str) -> Iterator[Pair]:
    """Two servers, the first of which shares a budget; which is started first changes by turns,
    since they are not alike in that either."""
    try:
        with contextlib.ExitStack() as stack:
            if next(_TURNS) % 2:
                second = stack.enter_context(other())
                yield stack.enter_context(one()), second
            else:
                yield stack.enter_context(one()), stack.enter_context(other())
    finally:
        path_of(budget).unlink(missing_ok=True)
