"""The state of a server: what it says, what it costs, and which changes it refuses."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.config import EllmConfig
from ellm_sgl.config.ranges import shown
from ellm_sgl.engine import Controller, InForce, Iteration, ServerLimits, StepLog
from ellm_sgl.latency import RooflineLatencyModel
from ellm_sgl.memory import NOTHING_UNDER_WAY, KVPool, PageTable, PoolShape
from ellm_sgl.policies import Fcfs, FixedRatio
from ellm_sgl.sglang import state
from ellm_sgl.sglang.context import Context, context_of
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.ranks import own_randomness
from ellm_sgl.sglang.replicas import CONTROL
from ellm_sgl.sglang.scheduler import EllmScheduler, scheduler_of
from tests.latency.machines import GPU, TINY

declare()

SHAPE = PoolShape(num_layers=4, layer_group=2, block_tokens=16)
BLOCKS = 32


class Server:
    """A scheduler process without SGLang's scheduler: our parts are the real ones."""

    def __init__(self, rank: int = 0) -> None:
        self.table = PageTable(SHAPE, 2 * BLOCKS, BLOCKS * SHAPE.num_groups)
        pool = KVPool(SHAPE, 1, 1, 8, torch.float32, "cpu")
        ours = Context(EllmConfig(), self.table, pool, 4096)
        self.sent: list[Any] = []
        channel = SimpleNamespace(send_output=lambda answer, _: self.sent.append(answer))
        self.scheduler: Any = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(ellm=ours),
            ps=SimpleNamespace(tp_size=1, tp_rank=rank, dp_rank=None),
            running_batch=SimpleNamespace(reqs=[]),
            last_batch=None,
            chunked_req=None,
            waiting_queue=[],
            schedule_low_priority_values_first=False,
            ipc_channels=SimpleNamespace(send_to_tokenizer=channel),
        )
        limits = ServerLimits(TINY, GPU, 8, math.inf, 4096)
        loop = Controller(Fcfs(), 0.005, StepLog(RooflineLatencyModel(TINY, GPU)), limits)
        self.iteration = Iteration(loop, ours.elastic, pool.unit_bytes)
        ours.iteration = self.iteration
        ours.scheduler = EllmScheduler(self.iteration, self.scheduler)
        self.policy_name = lambda: ours.policy_name

    def adjust(self, **values: Any) -> bool:
        """SGLang's own part accepts everything."""
        from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

        request = SetInternalStateReq(server_args=values)
        theirs = SetInternalStateReqOutput(updated=True)
        return bool(state.adjust(lambda *_: theirs, self.scheduler, request).updated)

    def control(self, method: str, **body: Any) -> Any:
        request = SimpleNamespace(method=CONTROL + method, body=body)
        state.control(lambda *_: None, self.scheduler, request)
        return self.sent[-1]

    def facts(self) -> tuple[Any, ...]:
        """What an adjustment changes."""
        policy = self.iteration.controller.guard.policy
        stands = self.iteration.in_force.stands
        return self.table.unit_limit, policy, self.policy_name(), stands


@pytest.fixture
def server() -> Server:
    return Server()


WRONG: list[Any] = [
    math.inf, -math.inf, math.nan, -5.5, -1, True, False, "8", "nan", None, [8], {}, 10**30,
    10**400, 1e300, -0.001,
]  # fmt: skip


@pytest.mark.parametrize("value", [*WRONG, 15, 15.999, (BLOCKS + 1) * 16], ids=shown)
def test_a_pool_size_that_makes_no_sense_changes_nothing_and_the_log_says_why(
    server: Server, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.facts()
    with caplog.at_level(logging.WARNING):
        assert not server.adjust(ellm_device_kv_tokens=value, ellm_ratio=0.5)
    assert server.facts() == before
    (said,) = caplog.messages
    assert f"ellm_device_kv_tokens {shown(value)}: give " in said and "\n" not in said
    assert "at most 512 (--ellm-max-device-kv-tokens)" in said


@pytest.mark.parametrize("value", [v for v in WRONG if v is not False] + [1, 1.0, 8], ids=shown)
def test_a_ratio_that_makes_no_sense_changes_nothing_and_the_log_says_why(
    server: Server, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.facts()
    with caplog.at_level(logging.WARNING):
        assert not server.adjust(ellm_ratio=value, ellm_device_kv_tokens=16 * BLOCKS)
    assert server.facts() == before
    (said,) = caplog.messages
    assert f"ellm_ratio {shown(value)}: give " in said and "\n" not in said


@given(st.dictionaries(
    st.sampled_from([state.RATIO, state.DEVICE_TOKENS]),
    st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text()),
))  # fmt: skip
def test_whatever_is_asked_for_the_server_goes_on(values: dict[str, Any]) -> None:
    server = Server()
    before = server.facts()
    if not server.adjust(**values):
        assert server.facts() == before
    assert SHAPE.num_groups <= server.table.unit_limit <= server.table.num_units


@pytest.mark.parametrize(("tokens", "blocks"), [(16, 1), (100, 6), (100.9, 6), (16 * BLOCKS, 32)])
def test_a_pool_size_is_rounded_down_to_whole_blocks(
    server: Server, tokens: float, blocks: int
) -> None:
    assert server.adjust(ellm_device_kv_tokens=tokens)
    assert server.table.unit_limit == blocks * SHAPE.num_groups


def test_the_state_says_what_has_become_of_a_size(server: Server) -> None:
    blocks = server.table.allocate(4)
    server.table.place(blocks)
    server.table.map(0, blocks, 64)  # of which nothing has been computed
    sizes = {"start_tokens": 16 * BLOCKS, "most_tokens": 16 * BLOCKS}
    assert state.describe(server.scheduler)["resize"] == {
        **sizes,
        "wanted_tokens": 16 * BLOCKS,
        "outcome": "applied",
    }
    for tokens, outcome in ((160, "applied"), (16, "floor")):
        assert server.adjust(ellm_device_kv_tokens=tokens)
        told = state.describe(server.scheduler)
        assert told["resize"] == {**sizes, "wanted_tokens": tokens, "outcome": outcome}
    assert told["device_units_total"] == 4 * SHAPE.num_groups
    assert told["device_bytes_committed"] == told["device_bytes_reserved"]


def test_a_ratio_becomes_the_fixed_ratio_policy(server: Server) -> None:
    assert server.adjust(ellm_ratio=0.25)
    policy = server.iteration.controller.guard.policy
    assert isinstance(policy, FixedRatio) and server.policy_name() == "fixed-ratio"


def test_what_sglang_refuses_of_its_own_keeps_ours_from_being_applied(server: Server) -> None:
    from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

    before = server.facts()
    request = SetInternalStateReq(server_args={"ellm_ratio": 0.5, "no_such_knob": 1})
    refuse = lambda *_: SetInternalStateReqOutput(updated=False)  # noqa: E731
    assert not state.adjust(refuse, server.scheduler, request).updated
    assert server.facts() == before


def test_the_page_table_is_checked_only_when_that_is_asked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0
    check = PageTable.check_integrity

    def counted(table: PageTable) -> None:
        nonlocal checks
        checks += 1
        check(table)

    monkeypatch.setattr(PageTable, "check_integrity", counted)
    plain = server.control("state", integrity=False).response[1]
    reported = state.report(SimpleNamespace(internal_state={}), server.scheduler).internal_state
    assert checks == 0 and "integrity" not in plain and reported["ellm"].keys() == plain.keys()
    checked = server.control("state", integrity=True).response[1]
    assert checks == 1 and checked == plain | {"integrity": "ok"}


def test_a_broken_page_table_is_told_of(server: Server) -> None:
    blocks = server.table.allocate(2)
    server.table.place(blocks)
    server.table._units[blocks[0]] = server.table.units[blocks[1]]
    assert (
        "owned more than once" in server.control("state", integrity=True).response[1]["integrity"]
    )


@pytest.mark.parametrize("part", ["statistics", "digest", "check_integrity"])
def test_a_rank_that_cannot_be_examined_still_answers_the_others(
    server: Server, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it, whatever else of it cannot be told."""
    gathered: list[Any] = []

    def gather(ranks: list[Any], mine: Any, group: object) -> None:
        gathered.append(mine)
        ranks[:] = [mine, ("ok", {}, "")]

    server.scheduler.ps.tp_size = 2
    server.scheduler.tp_group = SimpleNamespace(cpu_group=None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with monkeypatch.context() as broken:
        broken.setattr(PageTable, part, lambda _: 1 / 0)
        assert state.integrity(server.scheduler) == f"rank 0: {gathered[0][0]}"
    assert "ZeroDivisionError" in gathered[0][0]
    monkeypatch.setattr(state, "describe", lambda _: 1 / 0)
    assert not server.control("state", integrity=True).success and len(gathered) == 2


@pytest.mark.parametrize("problem", ["", "no thread can be started"])
def test_ranks_agree_whether_the_first_could_make_the_policy(
    server: Server, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "of_rank_0", lambda *_: problem)
    server.scheduler.ps.tp_rank = 1
    server.iteration.in_force = InForce(stands=True)
    tokens = 16 * (BLOCKS // 2)
    assert server.adjust(ellm_ratio=0.5, ellm_device_kv_tokens=tokens) == (not problem)
    assert server.iteration.in_force.stands == bool(problem)
    assert (server.table.unit_limit == server.table.num_units) == bool(problem)


def test_a_policy_draws_no_number_that_sampling_would_draw(server: Server) -> None:
    """Ranks sample for themselves, with generators that began alike."""
    for ranks, alike in ((1, False), (2, True)):
        server.scheduler.ps.tp_size = ranks
        before = torch.get_rng_state()
        with own_randomness(server.scheduler):
            torch.rand(1)
        assert torch.equal(torch.get_rng_state(), before) == alike


def test_the_state_says_how_much_of_each_request_is_cached(server: Server) -> None:
    for seq_id, (count, missing) in enumerate([(4, 0), (4, 1), (2, 2)]):
        blocks = server.table.allocate(count)
        server.table.place(blocks)
        server.table.map(seq_id, blocks, count * 16)
        for block in blocks[:missing].tolist():
            server.table.evict(block)
    told = state.describe(server.scheduler)
    assert told["cached_ratio_mean"] == pytest.approx((1 + 0.75 + 0) / 3)
    assert told["uncached_tokens"] == 48


@pytest.mark.parametrize("options", [{}, {"pause": math.inf}, {"pause": -1}], ids=str)
def test_ranks_other_than_the_first_are_asked_nothing_and_agree_all_the_same(
    options: dict[str, Any],
) -> None:
    """What rank 0 finds when it makes a policy is known to it alone."""
    settled = []
    for rank in range(2):
        server = Server(rank)
        server.iteration.in_force = InForce(stands=True)
        before = server.iteration.controller.guard
        server.control("policy", name="fcfs", options=options)
        assert (server.iteration.controller.guard is before) == (rank > 0 or bool(options))
        settled.append(server.iteration.in_force.stands)
    assert settled == [False, False]


@pytest.mark.parametrize("method", state.LOOKING)
def test_who_looks_ends_nobody(
    server: Server, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(state._CONTROLS, method, lambda *_: 1 / 0)
    answer = server.control(method, integrity=False)
    assert not answer.success and "ZeroDivisionError" in answer.error
    assert f"/ellm/{method} cannot be answered" in caplog.text


def test_a_policy_that_cannot_be_made_leaves_the_one_before_in_force(server: Server) -> None:
    before = server.iteration.controller.guard
    answer = server.control("policy", name="fcfs", options={"pause": math.nan})
    assert not answer.success and "pause: nan is not a finite number" in answer.error
    assert server.iteration.controller.guard is before


def test_a_prompt_computed_alone_learns_of_memory_that_others_take(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else runs or waits, so nothing is decided while its chunks follow one another."""
    ours = scheduler_of(server.scheduler)
    left = [8e9, 5e6]
    memory = SimpleNamespace(left=lambda: left.pop(0))
    context: Any = context_of(server.scheduler)
    monkeypatch.setattr(context, "memory", memory)
    monkeypatch.setattr(ours, "under_way", lambda: NOTHING_UNDER_WAY)
    server.scheduler.chunked_req = object()
    nobody: Any = SimpleNamespace(reqs=[])
    for seen in tuple(left):
        ours.decide(nobody)
        assert server.iteration.elastic.room.left_bytes == seen


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (None, "ok"),
        (0, "rank 1: block 3 is mapped twice"),
        (1, "rank 1 has {"),
        (2, "rank 1 has KV in other units than rank 0"),
    ],
)
def test_ranks_are_compared(
    server: Server, monkeypatch: pytest.MonkeyPatch, entry: int | None, said: str
) -> None:
    """Of the other rank: a table that contradicts itself, other counts, or other units."""
    server.scheduler.ps.tp_size = 2
    server.scheduler.tp_group = SimpleNamespace(cpu_group=None)

    def gather(ranks: list[Any], mine: tuple[Any, ...], group: Any) -> None:
        other = list(mine)
        if entry is not None:
            free = mine[1] | {"units_free": mine[1]["units_free"] - 1}
            other[entry] = ("block 3 is mapped twice", free, "another")[entry]
        ranks[:] = [mine, tuple(other)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert state.integrity(server.scheduler).startswith(said)


def test_a_prompt_that_is_computed_in_chunks_is_neither_running_nor_waiting(
    server: Server,
) -> None:
    assert state.describe(server.scheduler)["prefilling"] == 0
    server.scheduler.chunked_req = object()
    told = state.describe(server.scheduler)
    assert (told["running"], told["prefilling"], told["waiting"]) == (0, 1, 0)
