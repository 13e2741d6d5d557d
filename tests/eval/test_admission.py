"""SGLang's admission accounting."""

from __future__ import annotations

import pytest

from ellm_sgl.eval.simulator.admission.sglang import Candidate, NewTokenRatio, admit
from ellm_sgl.eval.simulator.modes import Chunk
from ellm_sgl.memory import AdmissionRoom


def run(room: int, *tokens: int, max_new: int = 64, **given):
    options = {"reserved": 0.0, "places": 8, "alone": False, "under_way": None} | given
    waiting = [Candidate(i, n, max_new, 0) for i, n in enumerate(tokens)]
    waiting = options.pop("waiting", waiting)
    return admit(AdmissionRoom(room), waiting, block_tokens=16, chunk_tokens=256, **options)


def test_requests_join_in_order_while_prompt_and_output_fit():
    assert [c.request for c in run(1000, 32, 32, 32).chunks] == [0, 1, 2]
    few = run(2 * (32 + 64 + 16) + 50, 32, 32, 32)
    assert [c.request for c in few.chunks] == [0, 1] and few.full


def test_what_running_requests_are_expected_to_need_is_set_aside():
    assert run(1000, 32, reserved=900.0).full


def test_long_outputs_count_for_no_more_than_sglangs_bound():
    assert run(4096 + 200, 32, max_new=10**6).chunks


def test_each_request_counts_with_what_it_keeps_at_its_own_ratio():
    # 32 + 64 + 16 tokens each: 112 of the device at ratio 0, 28 at 0.75.
    def admitted(*ratios):
        waiting = [Candidate(i, 32, 64, 0, ratio=r) for i, r in enumerate(ratios)]
        return [c.request for c in run(150, waiting=waiting).chunks]

    assert admitted(0.75, 0.0) == admitted(0.0, 0.75) == [0, 1]
    assert admitted(0.0, 0.0, 0.75) == [0]
    assert admitted(0.75, 0.75, 0.75, 0.75, 0.75) == [0, 1, 2, 3]  # so many prompts fit now


def test_a_request_that_would_be_alone_always_joins():
    assert not run(10, 32).chunks
    assert run(10, 32, alone=True).chunks == (Chunk(0, 0, 32, True),)


def test_places_bound_how_many_join():
    admitted = run(10_000, 32, 32, 32, places=2)
    assert len(admitted.chunks) == 2 and admitted.full


def test_a_prompt_beyond_the_chunk_is_cut_in_whole_blocks_and_goes_on_first():
    first = run(10_000, 32, 400, 32)
    assert first.chunks == (Chunk(0, 0, 32, True), Chunk(1, 0, 224, False))
    later = run(10_000, 32, under_way=Candidate(1, 400, 64, 0, begin=224))
    assert later.chunks == (Chunk(1, 224, 400, True), Chunk(0, 0, 32, True))
    alone = run(10_000, 32, under_way=Candidate(1, 400, 64, 0))
    assert alone.chunks == (Chunk(1, 0, 256, False),)


def test_what_is_under_way_is_charged_with_its_output():
    under_way = Candidate(1, 400, 64, 0, begin=224)
    assert len(run(176 + 64 + 16 + 32 + 64 + 16 + 1, 32, under_way=under_way).chunks) == 2
    assert len(run(176 + 64 + 16 + 32 + 64 + 16, 32, under_way=under_way).chunks) == 1


def test_the_ratio_decays_as_steps_go_well_and_rises_with_a_retraction():
    ratio = NewTokenRatio(1.0)
    assert ratio.current == pytest.approx(0.7)
    ratio.decay(300)
    assert ratio.current == pytest.approx((0.7 + 0.098) / 2)
    ratio.decay(10_000)
    assert ratio.current == pytest.approx(0.098)
    ratio.retracted(generated=300, max_new_tokens=999, requests=10)
    assert ratio.current == pytest.approx(0.5)
    ratio.reset()
    assert ratio.current == pytest.approx(0.7)
    assert NewTokenRatio(9.0).current == 1.0


def test_where_memory_suffices_addresses_bound_how_many_join():
    """However little of each stays on the device: 32 + 64 + 16 tokens of addresses each."""
    waiting = [Candidate(i, 32, 64, 0, ratio=0.99) for i in range(4)]
    admitted = run(10_000, waiting=waiting, slots=300)
    assert [c.request for c in admitted.chunks] == [0, 1] and admitted.full
    assert len(run(10_000, waiting=waiting, slots=300, reserved=100.0).chunks) == 1
