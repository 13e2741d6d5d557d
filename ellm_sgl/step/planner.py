"""From what the page table holds to the plan of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ellm_sgl.memory import ElasticMemory
from ellm_sgl.policies import WorkSplit
from ellm_sgl.step.hidden import plan_capture
from ellm_sgl.step.plan import NewTokens, StepPlan, TokenIds, plan_step
from ellm_sgl.step.restoration import Missing, Restoration, plan_restoration


class Planner:
    """Plans steps. What a plan takes, units that it borrows and host memory for hidden states that
    it captures, is in the plan.

    Args:
        elastic: memory, with every block that the step fills already placed.
        token_ids: gives the tokens of positions that are computed again.
        device: where the plan's tensors go.
        captures: hidden states are kept.
    """

    def __init__(
        self,
        elastic: ElasticMemory,
        token_ids: TokenIds,
        device: str | torch.device,
        captures: bool,
    ) -> None:
        self._elastic = elastic
        self._token_ids = token_ids
        self._device = device
        self._captures = captures

    def decode(self, seq_ids: Sequence[int], split: WorkSplit) -> StepPlan:
        """Plan one more token for each of these requests. Blocks that the step restores anyway are
        given units for good where there is room.

        Args:
            split: how layers and processor are divided.
        """
        table = self._elastic.table
        new = [NewTokens(s, n - 1, n) for s in seq_ids for n in (table.length_of(s),)]
        missing = None
        if table.missing_units:
            missing = Missing.of(table, seq_ids)
            self._elastic.restore(seq_ids, missing.blocks)
        plan = self._plan(new, missing, split)
        table.note_computed(seq_ids, [1] * len(new))
        return plan

    def extend(self, seq_ids: Sequence[int], counts: Sequence[int], split: WorkSplit) -> StepPlan:
        """Plan the last `counts` tokens of each request: a prompt, or a chunk of one."""
        table = self._elastic.table
        lengths = table.lengths_of(seq_ids).tolist()
        new = [NewTokens(s, n - c, n) for s, n, c in zip(seq_ids, lengths, counts, strict=True)]
        missing = Missing.of(table, seq_ids) if table.missing_units else None
        plan = self._plan(new, missing, split)
        table.note_computed(seq_ids, counts)
        return plan

    def _plan(
        self, new: Sequence[NewTokens], missing: Missing | None, split: WorkSplit
    ) -> StepPlan:
        """`missing`: as before any block was placed for good in this step; None: nothing."""
        table, totals = self._elastic.table, self._elastic.totals
        restoration = None if missing is None else self._restoration(missing, split)
        plan = plan_step(table, new, restoration, self._token_ids, self._device)
        totals.recomputed_tokens += plan.recomputed_rows
        plan = plan._replace(delta=split.delta_share)
        if self._captures:
            plan = plan._replace(capture=plan_capture(table, [n.seq_id for n in new], plan))
        return plan

    def _restoration(self, missing: Missing, split: WorkSplit) -> Restoration:
        elastic, totals = self._elastic, self._elastic.totals
        planned = plan_restoration(elastic.table, missing, split.recompute_share, elastic.slots)
        totals.fetched_units += planned.fetched_units
        totals.borrowed_units += len(planned.borrowed)
        totals.projected_units += planned.projected_units
        return planned
