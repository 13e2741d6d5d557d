"""Real steps of the model served, on requests that do not exist: what calibration measures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ellm_sgl.memory import PageTable
from ellm_sgl.sglang.context import Context
from ellm_sgl.sglang.cuda import captured
from ellm_sgl.sglang.mixes import Mix
from ellm_sgl.sglang.versions import adapter
from ellm_sgl.step import Missing, NewTokens, StepPlan, plan_restoration, plan_step

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class SyntheticSteps:
    """Runs steps of requests that do not exist.

    Their page table is a private one over the first units of the real pool.
    """

    def __init__(self, runner: ModelRunner, ours: Context) -> None:
        self._runner = runner
        self._executor = ours.executor
        self._pool, self._memory = ours.pool, ours.memory
        self._units: int = ours.table.committed_units
        self._context: int = runner.model_config.context_len
        self._cleared = 0

    def that_fit(self, mixes: Sequence[Mix]) -> list[Mix]:
        """Those that pool and context are large enough for, in their order, with what is restored
        in whole blocks; if there are none, a step of one request with all there is room for."""
        shape, units, context = self._pool.shape, self._units, self._context
        whole = dict.fromkeys(m.in_blocks(shape.block_tokens) for m in mixes)
        fitting = [m for m in whole if self._units_of(m) <= units and m.fits(context)]
        return fitting or [Mix(1, min(shape.tokens_in(units), context))]

    def outcome(self, mix: Mix, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of a step, and KV that it writes: [layers, 2, rows, KV heads, head size]. Tokens,
        and the KV that they attend to, are made up, by the seed."""
        units = self._units_of(mix)
        made_up = torch.Generator().manual_seed(seed)
        self._pool.buffer[: units + 1].normal_(generator=made_up)
        self._note(units)
        table, requests = self._requests(mix)
        batch = self._batch(mix)
        vocabulary = self._runner.model_config.vocab_size
        batch.input_ids.copy_(torch.randint(vocabulary, batch.input_ids.shape, generator=made_up))
        logits = self._forward(plan := self._plan(table, requests), batch).next_token_logits
        written = []
        for layer in range(self._pool.shape.num_layers):
            group = plan.groups[self._pool.shape.group_of(layer)]
            at = group.write_units, group.write_offsets
            written.append(torch.stack((self._pool.keys(layer)[at], self._pool.values(layer)[at])))
        return logits.clone(), torch.stack(written)

    def run(self, mix: Mix) -> float:
        """Seconds of one step."""
        self._clear(self._units_of(mix))
        table, requests = self._requests(mix)
        batch = self._batch(mix)
        device = self._pool.buffer.device
        synchronize(device)
        start = time.perf_counter()
        self._forward(self._plan(table, requests), batch)
        synchronize(device)
        return time.perf_counter() - start

    def _plan(self, table: PageTable, requests: list[NewTokens]) -> StepPlan:
        """All that is missing is recomputed."""
        missing = Missing.of(table, table.sequence_ids)
        restoration = plan_restoration(table, missing, recompute_share=1.0, slots=1)
        return plan_step(table, requests, restoration, _token_ids, self._pool.buffer.device)

    def _clear(self, units: int) -> None:
        """Values that arithmetic is neither slow on (denormal numbers) nor lost on (NaN)."""
        if units > self._cleared:
            self._pool.buffer[self._cleared : units + 1].zero_()
            self._note(units)

    def _note(self, units: int) -> None:
        """So many of the first units have been written to."""
        self._cleared = max(self._cleared, units)
        self._memory.note_written(units)

    def _forward(self, plan: StepPlan, batch: ForwardBatch) -> Any:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with (
            torch.no_grad(),
            forward_context(ForwardContext(attn_backend=self._runner.attn_backend)),
            self._executor.execute(plan),
        ):
            if (graphs := captured(self._runner, batch)) is not None:
                return graphs.execute(batch)
            return self._runner.model.forward(batch.input_ids, batch.positions, batch)

    def _requests(self, mix: Mix) -> tuple[PageTable, list[NewTokens]]:
        shape = self._pool.shape
        blocks = shape.blocks_for(mix.tokens)
        table = PageTable(shape, mix.requests * blocks, self._units_of(mix))
        for i in range(mix.requests):
            own = table.allocate(blocks)
            table.map(i, own, mix.tokens)
            table.place(own[mix.uncached // shape.block_tokens :])
        first = mix.tokens - mix.new
        return table, [NewTokens(i, first, mix.tokens) for i in range(mix.requests)]

    def _batch(self, mix: Mix) -> ForwardBatch:
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        device = self._pool.buffer.device
        first = mix.tokens - mix.new
        positions = torch.arange(first, mix.tokens, device=device).repeat(mix.requests)
        lengths = torch.full((mix.requests,), mix.tokens, device=device)
        new = torch.full((mix.requests,), mix.new, dtype=torch.int32, device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if mix.new == 1 else ForwardMode.EXTEND,
            batch_size=mix.requests,
            input_ids=torch.zeros_like(positions),
            req_pool_indices=torch.arange(mix.requests, device=device),
            seq_lens=lengths,
            out_cache_loc=torch.zeros_like(positions),
            seq_lens_sum=mix.requests * mix.tokens,
            positions=positions,
            extend_seq_lens=new,
            extend_seq_lens_cpu=new.tolist(),
            extend_prefix_lens=torch.full_like(new, first),
            extend_prefix_lens_cpu=[first] * mix.requests,
            extend_start_loc=torch.arange(mix.requests, device=device) * mix.new,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        setattr(batch, adapter().rows_field, len(positions))
        return batch

    def _units_of(self, mix: Mix) -> int:
        shape = self._pool.shape
        return mix.requests * shape.blocks_for(mix.tokens) * shape.num_groups


def synchronize(device: torch.device) -> None:
    """Wait for all that the device has been given."""
    torch.get_device_module(device).synchronize()


def _token_ids(seq_id: int, start: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.zeros(end - start, np.int64)
