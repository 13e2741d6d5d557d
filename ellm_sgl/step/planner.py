"""From what the page table holds to the plan of one step, and to its work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ellm_sgl.latency import StepWork
from ellm_sgl.memory import ElasticMemory
from ellm_sgl.policies import WorkSplit
from ellm_sgl.step.hidden import plan_capture
from ellm_sgl.step.plan import NewTokens, StepPlan, TokenIds, plan_step
from ellm_sgl.step.resident import ResidentDecodes
from ellm_sgl.step.restoration import Missing, plan_restoration


class Planner:
    """Plans steps. What a plan borrows and captures is in the plan.

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
        self._resident = ResidentDecodes(device)

    def decode(self, seq_ids: Sequence[int], split: WorkSplit) -> StepPlan:
        """Plan one more token for each of these requests. Blocks that the step restores anyway are
        given units for good where there is room."""
        table, plan = self._elastic.table, None
        share = self._recompute_share(seq_ids, split)  # before any block is placed
        if (missing := self._missing(seq_ids)) is not None:
            self._elastic.restore(seq_ids, missing.blocks)
        else:
            plan = self._resident.plan(table, seq_ids, table.lengths_of(seq_ids).tolist())
        return self._plan(seq_ids, [1] * len(seq_ids), missing, split, share, plan)

    def extend(self, seq_ids: Sequence[int], counts: Sequence[int], split: WorkSplit) -> StepPlan:
        """Plan the last `counts` tokens of each request: a prompt, or a chunk of one."""
        share = self._recompute_share(seq_ids, split)
        return self._plan(seq_ids, counts, self._missing(seq_ids), split, share)

    def _missing(self, seq_ids: Sequence[int]) -> Missing | None:
        """What these lack; None: nothing, whatever others lack (those that pause)."""
        if not self._elastic.table.missing_units:
            return None
        missing = Missing.of(self._elastic.table, seq_ids)
        return missing if len(missing.blocks) else None

    def _recompute_share(self, seq_ids: Sequence[int], split: WorkSplit) -> float:
        """φ; none where the rows of all that these lack are more than the step has room for: what
        the host has is fetched then, whatever the policy had planned."""
        elastic, share = self._elastic, split.recompute_share
        if not share or not elastic.table.missing_units or not elastic.table.host.num_units:
            return share
        rows = int(elastic.table.lacking_blocks(seq_ids).sum()) * elastic.table.shape.block_tokens
        return share if rows <= elastic.restorable_tokens(len(seq_ids)) else 0.0

    def _plan(
        self,
        seq_ids: Sequence[int],
        counts: Sequence[int],
        missing: Missing | None,
        split: WorkSplit,
        recompute_share: float,
        plan: StepPlan | None = None,
    ) -> StepPlan:
        """`missing`: as before any block was placed for good in this step; None: nothing. `plan`:
        where it has been made."""
        table, totals, restoration = self._elastic.table, self._elastic.totals, None
        if missing is not None:
            slots = self._elastic.slots
            restoration = plan_restoration(table, missing, recompute_share, slots)
            fetched = restoration.fetched_units
            totals.fetched_units += fetched
            totals.recomputed_units += int(missing.groups.sum()) - fetched
            totals.borrowed_units += len(restoration.borrowed)
            totals.projected_units += restoration.projected_units
        if plan is None:
            lengths = table.lengths_of(seq_ids).tolist()
            new = [NewTokens(s, n - c, n) for s, n, c in zip(seq_ids, lengths, counts, strict=True)]
            plan = plan_step(table, new, restoration, self._token_ids, self._device)
        totals.recomputed_tokens += plan.recomputed_rows
        plan = plan._replace(delta=split.delta_share)
        if self._captures:
            plan = plan._replace(capture=plan_capture(table, seq_ids, plan))
        table.note_computed(seq_ids, counts)
        return plan


def planned_work(plan: StepPlan, prompts: int) -> StepWork:
    """The work of a step as planned, summed up for a latency model: what its rows compute, what
    they read, what is fetched.

    Args:
        prompts: the first so many requests compute prompts, or chunks of them; the others decode.
    """
    requests = plan.groups[0].requests
    if not prompts and not plan.restored:  # most steps
        return StepWork(len(requests), sum(r.new.end_position for r in requests))
    rows = np.array([r.new.size for r in requests])
    ends = np.array([r.new.end_position for r in requests])
    counts, starts = np.array(plan.restored, np.int64).reshape(-1, 2).T
    new, until = rows[:prompts], ends[:prompts]
    computed = sum(group.rows - plan.new_rows for group in plan.groups)
    fetched = plan.fetched_tokens
    return StepWork(
        decode_rows=len(rows) - prompts,
        decode_tokens=int(ends[prompts:].sum()),
        restored_tokens=int(counts.sum()),
        restored_squares=float((counts * counts).sum()),
        restored_prefix=float((counts * starts).sum()),
        prefill_rows=int(new.sum()),
        prefill_pairs=float((new * until - new * (new - 1) / 2).sum()),
        swap_tokens=int(counts.sum()) if fetched else 0,
        recompute_share=computed / (computed + fetched) if computed + fetched else 1.0,
    )
