"""Values of all kinds that JSON may hold, or what is sent instead of it, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

ODD_TEXT = st.sampled_from(
    ["", " ", "nan", "inf", "-1", "1e999", "9" * 30, "9" * 5000, "0x10", "1_0", "１２", "\x00", '"',
     "2023-11-16 18:15:46.6805900", "0001-01-01", "9999-12-31T23:59:59+14:00", "2023-W01", "٣"]
)  # fmt: skip
ODD_NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), 2**63, -0.0, 1e308, 5e-324])
)
SCALARS = st.one_of(st.none(), st.booleans(), ODD_NUMBERS, ODD_TEXT, st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
