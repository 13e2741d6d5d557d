"""`python -m tests.simulation --lives 100000 --seed 0 --processes 2`: many lives, once."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import click
from rich.console import Console
from rich.progress import Progress

from tests.simulation.share import live_share

SHARE = 100
"""Lives that a process is given at a time."""


@click.command()
@click.option("--lives", default=2000, show_default=True, help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the first; the next one's is +1.")
@click.option("--processes", default=2, show_default=True)
@click.option("--shrink-s", default=30.0, show_default=True, help="Seconds per life that fails.")
@click.option("--json", "as_json", is_flag=True, help="Totals as JSON, on standard output.")
def main(lives: int, seed: int, processes: int, shrink_s: float, as_json: bool) -> None:
    """Simulate the memory plane; ends with 1 if a life failed, each written as a test to paste."""
    totals: Counter[str] = Counter()
    reports: list[str] = []
    console = Console(stderr=True)
    began = time.monotonic()
    with Progress(console=console) as progress:
        task = progress.add_task("lives", total=lives)
        for done, came_by, found in _shares(lives, seed, processes, shrink_s):
            totals += Counter(came_by)
            reports += found
            for report in found:
                console.print(report, markup=False, highlight=False)
            progress.update(task, advance=done, description=f"lives, {len(reports)} failed")
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps({"seconds": seconds, "failed": len(reports), "totals": totals}))
    else:
        console.print(f"{lives} lives in {seconds:.0f} s, {len(reports)} failed")
        for name, count in sorted(totals.items()):
            console.print(f"  {name:<40} {count:>12,}", highlight=False)
    sys.exit(bool(reports))


def _shares(
    lives: int, seed: int, processes: int, shrink_s: float
) -> Iterator[tuple[int, dict[str, int], list[str]]]:
    starts = range(seed, seed + lives, SHARE)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(live_share, at, min(at + SHARE, seed + lives), shrink_s) for at in starts
        ]
        for job in as_completed(jobs):
            yield job.result()


if __name__ == "__main__":
    main()
