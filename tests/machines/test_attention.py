"""Which of a GPU's attention kernels is expected to be the faster one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vasuki.machines.attention import PAGED_RATE, most_split_decodes


@given(processors=st.integers(1, 200), num_kv_heads=st.integers(1, 128))
def test_keys_are_split_while_packed_attention_leaves_processors_idle(processors: int, num_kv_heads: int) -> None:
    most = most_split_decodes("auto", processors, num_kv_heads)
    assert most * num_kv_heads <= PAGED_RATE * processors < (most + 1) * num_kv_heads


def test_a_profile_that_names_a_kernel_leaves_no_choice() -> None:
    assert most_split_decodes("packed", 132, 8) == most_split_decodes("paged", 132, 8) == 0
