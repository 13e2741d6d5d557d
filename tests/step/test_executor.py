"""A step takes what its plan says, and gives it back whatever happens."""

from __future__ import annotations

import pytest
import torch

from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.step import Executor, StepPlan
from tests.step.tiny import TinyDecoder

SHAPE = PoolShape(num_layers=2, layer_group=1, block_tokens=4)


class LostError(RuntimeError):
    pass


@pytest.mark.parametrize("fusion", [True, False])
def test_borrowed_units_come_back_though_the_pass_fails(fusion: bool) -> None:
    table = PageTable(SHAPE, 8, 8)
    executor = Executor(table, None, None, fusion)
    executor.attach(TinyDecoder(2, 8))
    nothing = torch.empty(0, dtype=torch.int64)
    plan = StepPlan(1, nothing, nothing, (), borrowed=table.borrow_units(3))

    def fail() -> None:
        with executor.execute(plan):
            assert executor.plan is plan and table.free_units == 5
            raise LostError

    with pytest.raises(LostError):
        fail()
    assert executor.plan is None and table.free_units == 8
    table.check_integrity()


def test_a_step_needs_a_model() -> None:
    executor = Executor(PageTable(SHAPE, 8, 8), None, None, fusion=True)
    nothing = torch.empty(0, dtype=torch.int64)
    with (
        pytest.raises(AssertionError, match="attach"),
        executor.execute(StepPlan(1, nothing, nothing, ())),
    ):
        pass
    assert not executor.attached and executor.plan is None
