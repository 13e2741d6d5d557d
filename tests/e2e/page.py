"""What the page at `/ellm/` has to show of a server's state, and what it shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest

from tests.e2e.browser import Browser

Answers = tuple[dict[str, Any], dict[str, Any]]
"""Of `/ellm/state` and of `/ellm/requests`."""

WAIT_S = 60.0
ROWS = 32
"""Requests that it shows at first."""
DECISIONS = 10
DRAWN = 0.01
"""How far a drawn share may be from what it stands for."""

SHOWN = """
const by = (id) => document.getElementById(id);
const text = (node) => node.checkVisibility() ? node.textContent : null;
const texts = (nodes) => [...nodes].map(text);
const width = (node) => node.getBoundingClientRect().width;
const shares = (bar) => [...bar.children].map((part) => width(part) / width(bar));
const heads = texts(document.querySelectorAll('th'));
return {
    figures: Object.fromEntries(arguments[0].map((id) => [id, text(by(id))])),
    over: by('slo').classList.contains('over'),
    meters: {device: shares(by('device')), host: shares(by('host'))},
    totals: Object.fromEntries([...by('totals').children].map((part) => texts(part.children))),
    decisions: [...by('decisions').rows].map((row) => Object.fromEntries(
        [['replaced', row.className === 'replaced'],
         ...texts(row.cells).map((cell, i) => [heads[i], cell])])),
    requests: [...by('list').children].map((item) => {
        const [rid, pace, bar] = ['.rid', '.pace', '.bar'].map((part) => item.querySelector(part));
        return {
            rid: rid.title, state: text(item.querySelector('.state')),
            amount: text(item.querySelector('.amount')), pace: text(pace),
            over: pace.classList.contains('over'), label: bar.ariaLabel,
            length: width(bar) / width(bar.parentElement),
            kinds: [...bar.children].map((span) => span.className), spans: shares(bar),
        };
    }),
};
"""
"""What is to be seen, in the names of `wanted`; nothing that is hidden."""

BARS = """
const tokens = (item, kinds) => [...item.querySelectorAll('.bar i')]
    .filter((span) => kinds.includes(span.className))
    .reduce((sum, span) => sum + Number(span.style.flexGrow), 0);
return Object.fromEntries([...document.querySelectorAll('#list li')].map((item) => [
    item.querySelector('.rid').title, [tokens(item, ['cached']), tokens(item, ['host', 'lost'])],
]));
"""


def wait_until_it_shows(window: Browser, look: Callable[[], Answers]) -> None:
    """Until all that is to be seen is what `look` finds: of a server that stands still, since the
    page asks once a second, and a server at work has gone on by then."""
    _, first = look()
    deadline = time.monotonic() + WAIT_S
    while True:
        state, seen = look()
        told = wanted(state, seen)
        shown = window.run(SHOWN, list(told["figures"]))
        ago = [row.pop("Ago") for row in shown["decisions"]]
        found, expected = dict(_leaves(shown)), dict(_leaves(told))
        differing = {
            name: (found.get(name), expected.get(name))
            for name in found.keys() | expected.keys()
            if found.get(name) != expected.get(name)
        }
        _, last = look()
        if not differing and _between(first["decisions"], ago, last["decisions"]):
            return
        assert time.monotonic() < deadline, differing or ago
        time.sleep(0.1)


def wait_until_bars_move(window: Browser) -> None:
    """Until bars have shown that cached tokens of a request went missing, and that missing ones
    came back. That tokens are added is neither."""
    earlier: dict[str, tuple[int, int]] = {}
    left = came_back = False
    deadline = time.monotonic() + WAIT_S
    while not (left and came_back):
        assert time.monotonic() < deadline, f"missing more: {left}, missing less: {came_back}"
        for rid, (cached, missing) in window.run(BARS).items():
            had_cached, had_missing = earlier.get(rid, (cached, missing))
            earlier[rid] = (cached, missing)
            if cached + missing < had_cached + had_missing:
                continue  # another request of this name
            left |= missing > had_missing and 0 < cached < had_cached
            came_back |= missing < had_missing and 0 < had_cached < cached
        time.sleep(0.1)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is not a list or a dict, by its place."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, f"{path}/{name}")
    else:
        yield path, value


def _between(
    first: Sequence[dict[str, Any]], ago: Sequence[str], last: Sequence[dict[str, Any]]
) -> bool:
    """Whether decisions are shown as old as they were at some time between two looks."""
    return all(
        milliseconds(ms(low["ago_ms"])) <= milliseconds(text) <= milliseconds(ms(high["ago_ms"]))
        for low, text, high in zip(first, ago, last, strict=False)
    )


def number(value: float, digits: int = 0) -> str:
    """As browsers write it: of what is halfway, up."""
    step = Decimal(1).scaleb(-digits)
    return f"{Decimal(repr(value)).quantize(step, ROUND_HALF_UP):,}"


def ms(value: float) -> str:
    if value >= 1000:
        return f"{number(value / 1000, 1)} s"
    return f"{number(value, 1 if value < 10 else 0)} ms"


def milliseconds(text: str) -> float:
    """What `ms` wrote."""
    amount, unit = text.replace(",", "").split()
    return float(amount) * {"ms": 1.0, "s": 1000.0}[unit]


def percent(share: float) -> str:
    return f"{number(100 * share)} %"


def wanted(state: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """What is to be seen where `/ellm/state` and `/ellm/requests` answer this, but how long ago
    decisions were: that grows between one answer and the next."""
    limit, used = in_use(state, "device")
    host, kept = in_use(state, "host")
    most = max(state["resize"]["most_tokens"], limit)
    rows = seen["requests"][:ROWS]
    longest = max([1, *(row["tokens"] for row in rows)])
    return {
        "figures": _figures(state, seen)
        | {
            "device-text": f"{number(used)} of {number(limit)} tokens",
            "host-text": f"{number(kept)} of {number(host)} tokens",
        },
        "over": bool(missed(seen)),
        "meters": {
            "device": _drawn([used / most, (limit - used) / most, 1 - limit / most]),
            "host": _drawn([kept / host, 0]),
        },
        "totals": {
            "evicted units": number(state["evicted_units_total"]),
            "fetched units": number(state["fetched_units_total"]),
            "recomputed tokens": number(state["recomputed_tokens_total"]),
            "back to stay": number(state["restored_units_total"]),
            "pauses": number(state["pauses_total"]),
            "retractions": number(state["retractions_total"]),
            "stalled": ms(state["swap_stall_ms_total"]),
            "steps": number(state["steps_total"]),
        },
        "decisions": [_decision(made) for made in seen["decisions"][:DECISIONS]],
        "requests": [_request(row, seen, longest) for row in rows],
    }


def in_use(state: dict[str, Any], tier: str) -> tuple[float, float]:
    """Tokens of KV that a tier may hold, and those that it holds."""
    tokens = state["block_tokens"] / state["layer_groups"]
    units = state[f"{tier}_units_total"]
    return units * tokens, (units - state[f"{tier}_units_free"]) * tokens


def slo_ms(row: dict[str, Any], seen: dict[str, Any]) -> float:
    slos = (row["tpot_slo_ms"], seen["tpot_slo_ms"])
    return min(math.inf if slo is None else float(slo) for slo in slos)


def paced(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """Requests that decode and whose time per output token is known."""
    rows = seen["requests"]
    return [row for row in rows if row["state"] == "decoding" and row["tpot_ms"] is not None]


def missed(seen: dict[str, Any]) -> int:
    """How many of them take longer than their SLO allows."""
    return sum(row["tpot_ms"] > slo_ms(row, seen) for row in paced(seen))


def tokens_of(row: dict[str, Any], seen: dict[str, Any], kind: str) -> int:
    return sum(tokens for tokens, place in row["spans"] if seen["kinds"][place] == kind)


def tokens_that_are(seen: dict[str, Any], kind: str) -> int:
    return sum(tokens_of(row, seen, kind) for row in seen["requests"])


def _figures(state: dict[str, Any], seen: dict[str, Any]) -> dict[str, str]:
    counts, prompts = seen["counts"], seen["counts"]["prefilling"]
    steps, policy, pace = seen["steps"], state["policy"], [row["tpot_ms"] for row in paced(seen)]
    slo = f"SLO {ms(seen['tpot_slo_ms'])}"
    fallbacks = ", ".join(f"{kind}: {number(n)}" for kind, n in policy["fallbacks"].items())
    busy = bool(seen["requests"])
    batch = f"batch {number(steps['batch'], 1)}" + (f", {prompts} prompt" if prompts else "")
    return {
        "policy-name": policy["name"],
        "decoding": number(counts["decoding"]),
        "batch": batch if busy else "",
        "paused": number(counts["paused"]),
        "waiting": number(state["waiting"]),
        "cached": percent(state["cached_ratio_mean"]),
        "ratio": f"r {number(seen['uncached_ratio'], 2)}" if busy else "",
        "rate": number(steps["tokens_per_s"]) if busy else "–",
        "tpot": ms(sum(pace) / len(pace)) if pace else "–",
        "slo": f"{number(missed(seen))} over, {slo}" if missed(seen) else slo,
        "step": ms(steps["mean_ms"]) if busy else "–",
        "predicted": f"predicted {ms(steps['predicted_ms'])}" if busy else "",
        "decided": f"{number(policy['decisions'])} since it was chosen",
        "fallbacks": f"{fallbacks} (* above)" if fallbacks else "none",
    }


def _decision(made: dict[str, Any]) -> dict[str, Any]:
    return {
        "replaced": made["replaced"],
        "Took": ms(made["took_ms"]) + (" *" if made["replaced"] else ""),
        "Run": str(made["running"]),
        "Wait": str(made["waiting"]),
        "Admit": str(made["admitted"]),
        "Pause": str(made["paused"]),
        "r": number(made["uncached_ratio"], 2),
        "l1:l2": f"{made['swap_layers']}:{made['recompute_layers']}",
        "δ": percent(made["delta"]),
    }


def _request(row: dict[str, Any], seen: dict[str, Any], longest: int) -> dict[str, Any]:
    cached, host, lost = (tokens_of(row, seen, kind) for kind in ("cached", "host", "lost"))
    tokens, spans, limit = row["tokens"], row["spans"], slo_ms(row, seen)
    over, pace, prompt = False, "", row["prompt"]
    if row["tpot_ms"] is not None:
        over = row["tpot_ms"] > limit
        pace = f"{ms(row['tpot_ms'])} {'>' if over else '≤'} {ms(limit)}"
    if prompt:
        pace = f"{percent(prompt['done'] / tokens)} of prompt, {ms(prompt['left_ms'])} left"
    label = f"{number(cached)} of {number(tokens)} tokens cached" if spans else "not begun"
    label += f", {number(host)} on the host" if host else ""
    label += f", {number(lost)} to recompute" if lost else ""
    return {
        "rid": f"{row['rid']}, priority {row['priority']}",
        "state": row["state"],
        "amount": f"{number(cached)} / {number(tokens)} cached"
        if spans
        else f"{number(tokens)} tokens",
        "pace": pace,
        "over": over,
        "label": label,
        "length": pytest.approx(tokens / longest, abs=DRAWN),
        "kinds": [seen["kinds"][kind] for _, kind in spans],
        "spans": _drawn([n / sum(n for n, _ in spans) for n, _ in spans]),
    }


def _drawn(shares: Sequence[float]) -> list[Any]:
    return [pytest.approx(share, abs=DRAWN) for share in shares]
