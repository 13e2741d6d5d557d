"""How tokens and layers are cut into units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import PoolShape


@pytest.mark.parametrize("field", ["num_layers", "layer_group", "block_tokens"])
def test_sizes_below_one_are_refused(field: str) -> None:
    sizes = {"num_layers": 4, "layer_group": 2, "block_tokens": 16, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        PoolShape(**sizes)


@given(layers=st.integers(1, 40), layer_group=st.integers(1, 50))
def test_groups_cut_the_layers_in_order(layers: int, layer_group: int) -> None:
    shape = PoolShape(layers, layer_group, block_tokens=16)
    groups = [shape.group_of(layer) for layer in range(layers)]
    assert groups == sorted(groups) and set(groups) == set(range(shape.num_groups))
    for layer, group in enumerate(groups):
        assert shape.ends_group(layer) == (groups[layer + 1 :][:1] != [group])


@given(tokens=st.integers(0, 100), block_tokens=st.integers(1, 20))
def test_blocks_hold_the_tokens_with_less_than_a_block_to_spare(
    tokens: int, block_tokens: int
) -> None:
    places = PoolShape(1, 1, block_tokens).blocks_for(tokens) * block_tokens
    assert tokens <= places < tokens + block_tokens
