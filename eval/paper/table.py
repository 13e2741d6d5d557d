"""The table: what the paper said, what the simulator says, what was measured here, and why."""

from __future__ import annotations

from ellm_sgl.eval.paper.elastic import rows as elastic
from ellm_sgl.eval.paper.end_to_end import end_to_end, under_load
from ellm_sgl.eval.paper.parts import parts
from ellm_sgl.eval.paper.results import Results
from ellm_sgl.eval.paper.row import Row


def rows(results: Results) -> list[Row]:
    """The whole table."""
    return [*end_to_end(results), *under_load(results), *parts(results), *elastic.rows(results)]
