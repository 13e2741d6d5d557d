"""The discrete-event loop: one iteration of SGLang's scheduler after the other, on numbers.

An iteration is what the server does: take arrivals in, ask the policy, admit (`admission`), then
run either a prefill step (chunked; decoding waits, as SGLang has it without mixed chunks) or a
decode step. Time is the latency model's. The same seed gives the same result.

For speed, up to `Settings.stride` decode steps follow one decision where nothing else can happen:
no request ends within them, no arrival is due, none is paused. Their times are summed exactly, each
with its own lengths; memory for their tokens is taken at once, and what that evicts is spread over
them. A stride of 1 is the server's own granularity.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from ellm_sgl.client.traces import FloatArray, IntArray
from ellm_sgl.engine.step_log import PhaseChanges
from ellm_sgl.eval.simulator.elastic import Elastic
from ellm_sgl.eval.simulator.load import Load, Progress, VirtualClock
from ellm_sgl.eval.simulator.machines import Machine
from ellm_sgl.eval.simulator.modes import Chunk, Span
from ellm_sgl.eval.simulator.record import Record
from ellm_sgl.eval.simulator.settings import (
    Settings,
    build_admission,
    build_mode,
    device_model,
)
from ellm_sgl.latency import StepWork

Tick = Callable[[int], None]
"""Called with the number of requests that have ended."""


class Simulation:
    """One server serving one load. Run it once.

    Args:
        machine: model and device.
        settings: of the server.
        load: what it is asked.

    Raises:
        ConfigError: the policy or its options make no sense.
    """

    def __init__(self, machine: Machine, settings: Settings, load: Load) -> None:
        self.machine = machine
        self.settings = settings
        self.load = load
        self.progress = Progress(load)
        self.clock = VirtualClock()
        self.mode = build_mode(machine, settings, load, self.progress, self.clock)
        self.admission = build_admission(machine, settings, self.mode, self.clock)
        self.record = Record()
        self._device = device_model(machine, settings)
        self._phase_changes = PhaseChanges()
        self._step_noise = np.array(settings.step_noise or [1.0])
        self._steps = 0
        self._running: list[int] = []
        self._waiting: IntArray = np.zeros(0, np.int64)
        self._arrived = 0
        self._step_s = 0.0
        """Time of the latest decode step."""

    def run(self, tick: Tick | None = None) -> None:
        """Serve everything; `record` and `progress` then tell what happened."""
        began = time.perf_counter()
        while self.record.ended < len(self.load):
            self._iterate()
            if tick is not None:
                tick(self.record.ended)
        self.mode.close()
        if self.settings.late_results:
            for column in (self.progress.first_s, self.progress.last_s):
                column[:] = self.record.one_step_late(column)
        self.record.wall_s = time.perf_counter() - began

    # -- one iteration ----------------------------------------------------------------------

    def _iterate(self) -> None:
        self._take_arrivals()
        if not self._running and not len(self._waiting) and self.admission.under_way is None:
            self._rest()
            return
        moves = self.mode.decide(self._running, self._waiting)
        if moves.back:
            self._fetch(moves.back)
        chunks = self.admission.admit(self._running, moves.admit, len(self._waiting) > 0)
        if chunks:
            begun = [chunk.request for chunk in chunks if chunk.begin == 0]
            self._waiting = self._waiting[~np.isin(self._waiting, begun)]
            self._prefill(chunks)
        elif self._running:
            self._decode(moves.pause)
        elif self.admission.lingering:
            self.admission.decode_begins()
        elif self._arrived < len(self.load):
            self._rest()
        else:
            raise RuntimeError(
                f"the policy {self.settings.policy} admits none of {len(self._waiting)} waiting "
                "requests to an idle server"
            )

    def _take_arrivals(self) -> None:
        due = int(np.searchsorted(self.load.at_s, self.clock.now_s, side="right"))
        taken = []
        for request in range(self._arrived, due):
            if self._impossible(request):
                self.progress.refused[request] = True
                self.record.ended += 1
            else:
                self.mode.arrived(request)
                taken.append(request)
        self._arrived = due
        self._waiting = np.concatenate((self._waiting, np.array(taken, np.int64)))

    def _impossible(self, request: int) -> bool:
        """Whether all of it together would be more than the device holds, where that matters."""
        if isinstance(self.mode, Elastic):
            return False
        tokens = self.load.prompt_tokens[request] + self.load.output_tokens[request]
        return bool(tokens + self.settings.block_tokens > self.machine.kv_tokens)

    def _rest(self) -> None:
        """Nothing to do until the next arrival."""
        self.record.rest()
        self.mode.idle()
        self.admission.rested()
        if self._arrived < len(self.load):
            self.clock.now_s = max(self.clock.now_s, float(self.load.at_s[self._arrived]))

    # -- steps ------------------------------------------------------------------------------

    def _fetch(self, requests: Sequence[int]) -> None:
        """These come back from host memory; meanwhile nothing else happens. A step that restores
        whole requests takes as much longer as one that restores parts."""
        host = self.mode.host
        assert host is not None, "only what was swapped out comes back"
        for request in requests:
            tokens = self.mode.prefill_tokens(request)
            self.mode.enter(Chunk(request, 0, tokens, last=True))
            self.clock.now_s += host.seconds(tokens)
            self.progress.kv_tokens[request] = tokens
            self.progress.on_host[request] = False
        self.clock.now_s += self.machine.profile.restore_overhead_s
        self._running.extend(requests)
        self._waiting = self._waiting[~np.isin(self._waiting, requests)]

    def _prefill(self, chunks: tuple[Chunk, ...]) -> None:
        rows = pairs = spans = squares = lost = 0.0
        for chunk in chunks:
            span = self.mode.enter(chunk)
            count = chunk.end - chunk.begin
            rows += count
            pairs += count * chunk.begin + count * (count + 1) / 2
            spans += span.rows
            squares += span.squares
            lost += span.lost
        self.mode.prefills(chunks)
        ended: list[int] = []
        if self.settings.mixed_chunks and self._decode_beside(rows, pairs):
            ended += self._end_finished()
        else:
            work = StepWork(
                0,
                0,
                spans,
                squares,
                prefill_rows=rows,
                prefill_pairs=pairs,
                phase_changes=self._phase_changes.of(prefills=True),
                swap_tokens=spans,
                recompute_share=lost / max(spans, 1.0),
            )
            self._log(work)
            self.clock.now_s += float(self._device.step_seconds(work) * self._noise(1)[0])
        self.record.prefill(self.clock.now_s, int(rows))
        for chunk in chunks:
            if chunk.last:
                ended += self._prefilled(chunk)
        self.admission.stepped(0, ended)

    def _prefilled(self, chunk: Chunk) -> list[int]:
        """A prompt is computed to its end. Returns who has all of its output."""
        self.progress.kv_tokens[chunk.request] = chunk.end
        self._running.append(chunk.request)
        self._tokens_came(np.array([chunk.request]), np.array([self.clock.now_s]))
        ended = self._end_finished()
        if self.mode.computed_into_host(chunk.request):
            self._running.remove(chunk.request)
            self.progress.kv_tokens[chunk.request] = 0
            out = self.progress.on_host[self._waiting]
            others = self._waiting[out], self._waiting[~out]
            self._waiting = np.concatenate((others[0], [chunk.request], others[1]))
        return ended

    def _decode_beside(self, rows: float, pairs: float) -> bool:
        """A step of all that run, if anybody does, and of these rows of prompts."""
        ids, fits = self._with_room(list(self._running), 1)
        if not fits:
            return False
        own = self._decode_work(ids, 1, *self.mode.grow(ids, 1))
        work = dataclasses.replace(own, prefill_rows=rows, prefill_pairs=pairs)
        self._stepped(ids, work, self._device.step_seconds(work) * self._noise(1))
        return True

    def _decode(self, pause: frozenset[int]) -> None:
        self.admission.decode_begins()
        decoding = [i for i in self._running if i not in pause] or self._running
        paused = [i for i in self._running if i in pause]
        self.mode.pause(paused)
        steps = 1 if pause else self._stride(decoding)
        ids, fitting = self._with_room(decoding, steps)
        if not fitting:
            return
        work = self._decode_work(ids, fitting, *self.mode.grow(ids, fitting))
        self._log(work)
        ahead = self.mode.fetch_ahead(paused, len(ids), self._step_s)
        restored = work.restored_tokens + ahead
        moved = dataclasses.replace(
            work,
            restored_tokens=restored,
            swap_tokens=restored,
            recompute_share=work.recompute_share * work.restored_tokens / np.maximum(restored, 1),
        )
        self._stepped(ids, work, self._device.step_seconds(moved) * self._noise(fitting))
        self.admission.stepped(fitting, self._end_finished())

    def _with_room(self, decoding: list[int], steps: int) -> tuple[IntArray, int]:
        """Who of these can decode, others having lost their place, and how many steps, at most so
        many; nobody, and 0, where none finds room."""
        while decoding and (fits := self.mode.steps_that_fit(np.array(decoding), steps)) == 0:
            victim = self.admission.victim(decoding)
            decoding = [i for i in decoding if i != victim]
            self._retract(victim)
        return np.array(decoding, np.int64), fits if decoding else 0

    def _stepped(self, ids: IntArray, work: StepWork, seconds: FloatArray) -> None:
        """These requests have decoded, in steps of so many seconds."""
        ends = self.clock.now_s + np.cumsum(seconds)
        self.progress.kv_tokens[ids] += len(seconds)
        self.record.blocks(self.progress.kv_tokens[ids], self.settings.block_tokens)
        self._step_s = float(seconds[-1])
        self.clock.now_s = float(ends[-1])
        self._tokens_came(ids, ends)
        self.mode.decoded(ids, len(seconds))
        self.record.decode(ends, float(seconds.sum()), len(ids), len(self._waiting), work)

    def _noise(self, steps: int) -> FloatArray:
        """By how much each of the next steps takes longer than the device's model says."""
        at = np.arange(self._steps, self._steps + steps) % len(self._step_noise)
        self._steps += steps
        return self._step_noise[at]

    def _stride(self, decoding: list[int]) -> int:
        """Steps until something else happens."""
        ids = np.array(decoding)
        left = int((self.load.output_tokens[ids] - self.progress.generated[ids]).min())
        steps = min(self.settings.stride, left)
        if self._arrived < len(self.load) and self._step_s > 0:
            until = (float(self.load.at_s[self._arrived]) - self.clock.now_s) / self._step_s
            steps = min(steps, max(math.ceil(until), 1))
        return max(steps, 1)

    def _decode_work(self, ids: IntArray, steps: int, first: Span, last: Span) -> StepWork:
        """The work of each of these steps, in arrays; `first` and `last` as of `Mode.grow`."""
        after = np.arange(1, steps + 1)
        share = after / steps
        tokens = float(self.progress.kv_tokens[ids].sum())
        if steps == 1:
            last = first
        restored = first.rows + share * (last.rows - first.rows)
        lost = first.lost + share * (last.lost - first.lost)
        return StepWork(
            phase_changes=self._phase_changes.of(prefills=False) * (after == 1),
            decode_rows=len(ids),
            decode_tokens=tokens + len(ids) * after,
            restored_tokens=restored,
            swap_tokens=restored,
            recompute_share=lost / np.maximum(restored, 1),
            restored_squares=first.squares + share * (last.squares - first.squares),
        )

    def _log(self, work: StepWork) -> None:
        """Tell the control loop; several steps count as their first."""
        if isinstance(self.mode, Elastic):
            one = StepWork(**{name: float(np.ravel(of)[0]) for name, of in vars(work).items()})
            told = self._device.restored(one) if self.settings.step_noise else one
            self.mode.iteration.started(told, np.size(work.decode_tokens))

    # -- requests ---------------------------------------------------------------------------

    def _tokens_came(self, ids: IntArray, ends: FloatArray) -> None:
        """Each of these requests got a token at each of these times."""
        progress = self.progress
        fresh = np.isnan(progress.first_s[ids])
        self.record.tokens(ends, progress.last_s[ids][~fresh], int(fresh.sum()))
        progress.first_s[ids[fresh]] = ends[0]
        progress.last_s[ids] = ends[-1]
        progress.generated[ids] += len(ends)

    def _end_finished(self) -> list[int]:
        progress = self.progress
        running = np.array(self._running)
        done = progress.generated[running] >= self.load.output_tokens[running]
        ended: list[int] = running[done].tolist()
        for request in ended:
            self._running.remove(request)
            self.mode.leave(request, retracted=False)
            self.record.ended += 1
        return ended

    def _retract(self, request: int) -> None:
        self._running.remove(request)
        self.mode.leave(request, retracted=True)
        self.progress.kv_tokens[request] = 0
        self.record.retractions += 1
        self._waiting = self.admission.queue_again(request, self._waiting, self._running)
