"""LENGTHS.csv: what is read, and what is said of a file that cannot be."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from vasuki.base.errors import InputError
from vasuki.planner.lengths import Lengths, SharedPrefixes, read_lengths


def write(folder: Path, text: str) -> Path:
    path = folder / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_are_found_by_name_and_others_ignored(tmp_path: Path) -> None:
    lengths = read_lengths(
        write(tmp_path, "ratio,num_decode_tokens,arrived_at,num_prefill_tokens\n1.5,10,0,15\n\n2,7,0.5,14\n")
    )
    assert lengths.prompt_tokens.tolist() == [15, 14]
    assert lengths.output_tokens.tolist() == [10, 7]
    assert lengths.arrived_at_s is not None
    assert lengths.arrived_at_s.tolist() == [0, 0.5]


def test_arrivals_are_optional(tmp_path: Path) -> None:
    lengths = read_lengths(write(tmp_path, "\ufeffnum_prefill_tokens,num_decode_tokens\n15,10\n"))
    assert lengths.arrived_at_s is None
    assert len(lengths) == 1


def test_priorities_and_deadlines_are_read_from_the_columns_that_the_job_names(tmp_path: Path) -> None:
    path = write(
        tmp_path, "num_prefill_tokens,num_decode_tokens,arrived_at,how,within\n5,2,1,,\n5,2,3,2.5,0.5\n5,2,4,-1,0\n"
    )
    assert read_lengths(path).priority is None
    lengths = read_lengths(path, "how", "within")
    assert [request.urgency for request in lengths.requests()] == [(0, math.inf), (-2.5, 3.5), (1, 4)]
    (last,) = lengths.take(np.array([1])).requests()
    assert last.urgency == (-2.5, 0.5)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("very,1", "line 3: the priority is not a number"),
        ("1,soon", "line 3: the deadline must be seconds from 0 on"),
        ("1", "line 3: not a row of lengths: 5,2,1"),
        ("nan,1", "line 3: the priority is not a number"),
        ("inf,1", "line 3: the priority is not a number"),
        ("1,-1", "line 3: the deadline must be seconds from 0 on"),
        ("1,nan", "line 3: the deadline must be seconds from 0 on"),
    ],
)
def test_an_urgency_that_is_none_is_named(tmp_path: Path, cells: str, message: str) -> None:
    path = write(tmp_path, f"num_prefill_tokens,num_decode_tokens,how,within\n5,2,,\n5,2,{cells}\n")
    with pytest.raises(InputError, match=re.escape(message)):
        read_lengths(path, "how", "within")


def test_a_column_that_the_job_names_and_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "num_prefill_tokens,num_decode_tokens,how\n5,2,1\n")
    with pytest.raises(InputError, match=r"has no column hows \(did you mean 'how'\?\), which the job names"):
        read_lengths(path, priority="hows")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_prefill_token,num_decode_tokens\n1,2\n", "did you mean 'num_prefill_token'"),
        ("", "has no column num_prefill_tokens"),
        ("num_prefill_tokens,num_decode_tokens\n", "has no rows"),
        ("num_prefill_tokens,num_decode_tokens\n1,2\n1,x\n", "line 3: not a row of lengths: 1,x"),
        ("num_prefill_tokens,num_decode_tokens\n1\n", "line 2: not a row of lengths: 1"),
        ("num_prefill_tokens,num_decode_tokens\n1,2\n0,2\n", "line 3: num_prefill_tokens must be at least 1"),
        ("num_prefill_tokens,num_decode_tokens\n1,-2\n", "line 2: num_decode_tokens must be at least 1"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at\n1,2,5\n1,2,4\n", "line 3: arrived_at falls"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at\n1,2,0\n\n1,2,-3\n", "line 4: arrived_at must be seconds"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at\n1,2,nan\n", "line 2: arrived_at must be seconds from 0 on"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_lengths(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_binary_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_lengths(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="is not a CSV file"):
        read_lengths(tmp_path / "binary.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match="it is a pipe"):
        read_lengths(tmp_path / "pipe.csv")


def test_requests_know_the_limit_and_only_on_demand_the_length() -> None:
    lengths = Lengths(np.array([5, 6]), np.array([10, 30]))
    assert [(r.max_tokens, r.expected_tokens) for r in lengths.requests()] == [(30, 30), (30, 30)]
    assert [(r.max_tokens, r.expected_tokens) for r in lengths.requests(known=True)] == [(30, 10), (30, 30)]
    limited = Lengths(np.array([5, 6]), np.array([10, 30]), None, np.array([20, 25]))
    assert [(r.max_tokens, r.expected_tokens) for r in limited.requests(known=True)] == [(20, 10), (25, 25)]
    assert limited.take(np.array([1])).limits.tolist() == [25]


def test_stretches_that_some_row_computes_are_those_of_a_tree_of_prefixes() -> None:
    random = np.random.default_rng(0)
    texts = [random.integers(0, 2, 12, dtype=np.int32)[: random.integers(0, 13)] for _ in range(60)]
    prefixes = SharedPrefixes(texts, np.repeat(np.arange(60), 2))
    shared = np.array([random.integers(0, len(texts[row // 2]) + 1) for row in range(120)])
    starts, ends = prefixes.computed_once(shared)
    beginnings = {tuple(texts[row // 2][:end]) for row in range(120) for end in range(1, shared[row] + 1)}
    assert (ends - starts).sum() == len(beginnings)
    depths = [depth for start, end in zip(starts, ends, strict=True) for depth in range(start, end)]
    assert sorted(depths) == sorted(len(each) - 1 for each in beginnings)
