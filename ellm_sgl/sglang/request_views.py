"""What those see who watch a server: each request with what of it is cached, the last decisions and
the pace of steps. `GET /ellm/requests` answers it, once a second to whoever looks.

Bounded: so many requests, and so many spans of each, whatever the load.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ellm_sgl.engine import Iteration
from ellm_sgl.memory import PageTable
from ellm_sgl.policies import Requests
from ellm_sgl.sglang.context import context_of, row_of
from ellm_sgl.sglang.prompt_progress import describe_progress
from ellm_sgl.sglang.scheduler import EllmScheduler, scheduler_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

MOST_REQUESTS = 256
"""Running ones first; the others are counted."""
MOST_SPANS = 96
"""Of a request that has more, pieces as long as each other, each as most of its blocks are."""
MOST_RID = 128
"""Characters of a name that a client may have given."""
RECENT_S = 1.0
"""What steps do of late is what they did in so many seconds."""

STATES = ("decoding", "paused", "prefilling", "waiting")
"""Of requests."""
KINDS = ("cached", "host", "lost")
"""Of a span of tokens: on the device; to be fetched from the host; to be recomputed."""


def describe_requests(scheduler: Scheduler) -> dict[str, Any]:
    """What `GET /ellm/requests` answers. Times in milliseconds, none of those that are infinite or
    not known yet."""
    ours = scheduler_of(scheduler)
    known = list(_known(ours))
    shown = known[:MOST_REQUESTS]
    counts = collections.Counter(state for state, _ in known)
    return {
        "requests": _rows(ours, shown),
        "counts": {state: counts[state] for state in STATES},
        "left_out": len(known) - len(shown),
        "kinds": KINDS,
        "tpot_slo_ms": _ms(ours.iteration.controller.limits.tpot_slo_s),
        "uncached_ratio": _mean(list(ours.iteration.in_force.uncached_ratios.values())),
        "decisions": _decisions(ours.iteration),
        "steps": _steps(ours.iteration),
    }


def _known(ours: EllmScheduler) -> Iterator[tuple[str, Req]]:
    """Requests with what they do, each once; those of a prompt that was just computed are between
    SGLang's lists."""
    scheduler = ours.scheduler
    seen: set[int] = set()
    chunked, last = scheduler.chunked_req, scheduler.last_batch
    last_reqs = [] if last is None else last.reqs
    groups = (
        ("decoding", scheduler.running_batch.reqs),
        ("prefilling", [] if chunked is None else [chunked]),
        ("decoding", last_reqs),
        ("waiting", scheduler.waiting_queue),
    )
    for state, reqs in groups:
        for req in reqs:
            if id(req) in seen or req.finished():
                continue
            seen.add(id(req))
            paused = state == "decoding" and ours.is_paused(req)
            yield "paused" if paused else state, req


def _rows(ours: EllmScheduler, known: Sequence[tuple[str, Req]]) -> list[dict[str, Any]]:
    if not known:
        return []
    table = context_of(ours.scheduler).table
    reqs = [req for _, req in known]
    mapped = set(table.sequence_ids)
    rows = [row_of(req) if state != "waiting" else None for state, req in known]
    rows = [row if row in mapped else None for row in rows]
    spans = spans_of(table, [row for row in rows if row is not None])
    facts, ratios = _facts(ours, reqs), ours.iteration.in_force.uncached_ratios
    return [
        {
            "rid": str(req.rid)[:MOST_RID],
            "state": state,
            "tokens": len(req.origin_input_ids) + len(req.output_ids),
            "prompt_tokens": len(req.origin_input_ids),
            "max_new_tokens": int(facts.max_new_tokens[i]),
            "priority": ours.turned(int(facts.priority[i])),
            "spans": [] if row is None else next(spans),
            "prompt": None if state != "prefilling" else _progress(ours, req, row),
            "uncached_ratio": 0.0 if row is None else ratios.get(row, 0.0),
            "waited_ms": _ms(facts.waited_s[i]),
            "tpot_ms": _ms(facts.tpot_s[i]),
            "tpot_slo_ms": _ms(facts.tpot_slo_s[i]),
            "ttft_slo_ms": _ms(facts.ttft_slo_s[i]),
        }
        for i, ((state, req), row) in enumerate(zip(known, rows, strict=True))
    ]


def _progress(ours: EllmScheduler, req: Req, row: int | None) -> dict[str, Any]:
    """How far the prompt is that is being computed in chunks."""
    scheduler, log = ours.scheduler, ours.iteration.controller.steps
    total = len(req.origin_input_ids) + len(req.output_ids)
    done = 0 if row is None else min(context_of(scheduler).table.length_of(row), total)
    in_flight = 0 if log.in_flight is None else int(log.in_flight.prefill_rows)
    most = scheduler.chunked_prefill_size or total
    return describe_progress(done, total, in_flight, most, reversed(log.reports), log.model)


def _facts(ours: EllmScheduler, reqs: Sequence[Req]) -> Requests:
    return ours.iteration.requests.waiting(ours.entries(reqs), ours.iteration.clock())


def spans_of(table: PageTable, seq_ids: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Of each of these requests, (tokens, place in `KINDS`) from its first token to its last,
    neighbours of a kind as one."""
    blocks = [table.blocks_of(seq_id) for seq_id in seq_ids]
    if not blocks:
        return
    every = np.concatenate(blocks)
    kinds = np.zeros(len(every), np.int64)
    if table.missing_units:
        lacking = np.flatnonzero(table.misses_units(every))
        kinds[lacking] = np.where(table.depth(every[lacking]) == 0, 1, 2)
    ends = itertools.accumulate(map(len, blocks))
    for seq_id, count, end in zip(seq_ids, map(len, blocks), ends, strict=True):
        yield _runs(kinds[end - count : end], table.length_of(seq_id), table.shape.block_tokens)


def _runs(kinds: npt.NDArray[np.int64], length: int, block_tokens: int) -> list[tuple[int, int]]:
    if not len(kinds):
        return []
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    if len(starts) > MOST_SPANS:
        starts = np.linspace(0, len(kinds), MOST_SPANS, endpoint=False).astype(np.int64)
        counts = [np.add.reduceat(kinds == kind, starts) for kind in range(len(KINDS))]
        found = np.argmax(counts, axis=0).tolist()
    else:
        found = kinds[starts].tolist()
    ends = np.minimum(np.append(starts[1:], len(kinds)) * block_tokens, length)
    tokens = np.diff(ends, prepend=0).tolist()
    return [(int(n), kind) for n, kind in zip(tokens, found, strict=True)]


def _decisions(iteration: Iteration) -> list[dict[str, Any]]:
    """The last ones, latest first."""
    now_s = iteration.clock()
    return [
        {
            "ago_ms": (now_s - made.at_s) * 1e3,
            "took_ms": made.seconds * 1e3,
            "running": made.running,
            "waiting": made.waiting,
            "admitted": len(made.decision.admit),
            "paused": len(made.decision.pause),
            "uncached_ratio": _mean(made.decision.ratios),
            "swap_layers": made.decision.split.swap_layers,
            "recompute_layers": made.decision.split.recompute_layers,
            "delta": made.decision.split.delta_share,
            "replaced": made.replaced,
        }
        for made in reversed(iteration.controller.last)
    ]


def _steps(iteration: Iteration) -> dict[str, Any]:
    """What steps of the last `RECENT_S` did."""
    steps = iteration.controller.steps.recent(RECENT_S)
    seconds = sum(step.seconds for step in steps)
    count = max(len(steps), 1)
    return {
        "total": iteration.controller.steps.steps,
        "mean_ms": seconds / count * 1e3,
        "predicted_ms": sum(s.predicted_s for s in steps) / count * 1e3,
        "stalled_ms": sum(s.swap_stall_s for s in steps) / count * 1e3,
        "batch": _mean([float(s.work.decode_rows) for s in steps if s.work.decode_rows]),
        "tokens_per_s": float(sum(s.work.decode_rows for s in steps)) / seconds if seconds else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def _ms(seconds: float) -> float | None:
    return float(seconds) * 1e3 if np.isfinite(seconds) else None
