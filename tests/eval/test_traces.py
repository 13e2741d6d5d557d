"""Trace files: what is read, and one clear message for each that is no trace."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ellm_sgl.client.traces import Trace, TraceError, read_azure, read_lengths

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = Path(__file__).parents[3] / "shared" / "data" / "azure_conv_2023.csv"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_an_azure_trace_is_read_from_its_first_arrival_on(tmp_path):
    path = written(
        tmp_path,
        HEADER
        + "2023-11-16 18:15:46.6805900,374,44\n"
        + "2023-11-16 18:15:50.9951690,396,109\n"
        + "2023-11-16 18:16:00,12,0\n"  # generates nothing
        + "2023-11-16 18:16:46.680590,1,1\n",
    )
    trace = read_azure(path)
    np.testing.assert_allclose(trace.at_s, [0, 4.314579, 60])
    assert trace.prompt_tokens.tolist() == [374, 396, 1]
    assert trace.output_tokens.tolist() == [44, 109, 1]


def test_columns_may_stand_in_any_order_among_others(tmp_path):
    path = written(
        tmp_path, "GeneratedTokens,who,TIMESTAMP,ContextTokens\n5,me,2023-11-16 18:15:46,7\n"
    )
    trace = read_azure(path)
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (7, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        (HEADER, "no requests"),
        (HEADER + "2023-11-16 18:15:46,-1,4\n", "line 2: ContextTokens is '-1'"),
        (HEADER + "2023-11-16 18:15:46,1,many\n", "line 2: GeneratedTokens is 'many'"),
        (HEADER + "2023-11-16 18:15:46,1\n", "line 2: 2 columns only"),
        (HEADER + "yesterday,1,1\n", "'yesterday' is no time"),
        (
            HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n",
            "line 3: .* is before the line above",
        ),
        (HEADER + "2023-11-16 18:15:46,99999999999999999999,1\n", "is '9+'; give a whole number"),
        (HEADER + "2023-11-16 18:15:46,1," + "9" * 5000 + "\n", "GeneratedTokens is '9+"),
        (HEADER + "2023-11-16 18:15:46,nan,1\n", "ContextTokens is 'nan'"),
        (HEADER + "2023-11-16 18:15:46,inf,1\n", "ContextTokens is 'inf'"),
        (HEADER + "2023-11-16 18:15:46,1e3,1\n", "ContextTokens is '1e3'"),
        (
            HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47+00:00,1,1\n",
            "line 3: .* names a time zone, or another line does",
        ),
        (
            HEADER + "2023-11-16 18:15:46.6805900+00:00,1,1\n2023-11-16 18:15:47.5,1,1\n",
            "line 3: .* names a time zone, or another line does",
        ),
        (HEADER + "2023-11-16 18:15:46," + "1" * 200_000 + ",1\n", "cannot be read: field larger"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(TraceError, match=message):
        read_azure(written(tmp_path, text))


def test_a_missing_file_is_one_message(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_azure(tmp_path / "none.csv")


def test_lengths_are_read_and_checked(tmp_path):
    prompts, outputs = read_lengths(written(tmp_path, "prompt_tokens,output_tokens\n3,4\n5,6\n"))
    assert (prompts.tolist(), outputs.tolist()) == ([3, 5], [4, 6])
    with pytest.raises(TraceError, match="from 1 up"):
        read_lengths(written(tmp_path, "prompt_tokens,output_tokens\n0,4\n"))


def test_scaling_changes_rate_and_lengths_and_keeps_a_token():
    trace = Trace(np.array([0.0, 2.0]), np.array([100, 1]), np.array([10, 1]))
    scaled = trace.scaled(rate=2, lengths=0.1)
    assert scaled.at_s.tolist() == [0, 1]
    assert scaled.prompt_tokens.tolist() == [10, 1]
    assert scaled.output_tokens.tolist() == [1, 1]


@pytest.mark.parametrize("factor", [0, -1, math.nan, math.inf, 1e300, True, "2"])
def test_factors_that_make_no_sense_are_refused(factor):
    trace = Trace(np.array([0.0, 2.0]), np.array([100, 1]), np.array([10, 1]))
    for name in ("rate", "lengths"):
        with pytest.raises(ValueError, match=f"the factor of the {name} must be .* above 0"):
            trace.scaled(**{name: factor})


def test_arrivals_and_lengths_beyond_those_of_any_server_are_refused():
    trace = Trace(np.array([0.0, 2.0]), np.array([100, 1]), np.array([10, 1]))
    for rate in (1e-10, 1e-308):
        with pytest.raises(ValueError, match=r"the last request would arrive after .* larger"):
            trace.scaled(rate=rate)
    with pytest.raises(ValueError, match=r"1e\+08 tokens, more than 10,000,000; .* smaller"):
        trace.scaled(lengths=1e6)
    with pytest.raises(ValueError, match="the last request would arrive after inf s"):
        Trace(np.array([0.0, math.inf]), trace.prompt_tokens, trace.output_tokens).scaled()


def test_a_part_begins_with_its_first_request():
    trace = Trace(np.array([0.0, 2.0, 5.0]), np.array([100, 1, 7]), np.array([10, 1, 8]))
    part = trace.part(1, 3)
    assert part.at_s.tolist() == [0.0, 3.0]
    assert (part.prompt_tokens.tolist(), part.output_tokens.tolist()) == ([1, 7], [1, 8])
    assert len(trace.part(3, 3)) == 0 and trace.first(2).at_s.tolist() == [0.0, 2.0]


@pytest.mark.skipif(not AZURE.exists(), reason="the public trace is not at hand")
def test_the_public_azure_trace_is_read():
    trace = read_azure(AZURE)
    assert len(trace) > 19_000
    assert (np.diff(trace.at_s) >= 0).all()
