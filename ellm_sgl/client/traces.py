"""Traces: when requests arrive and how long they are, from files. No prompts in here.

The format is that of the public Azure LLM inference traces (`TIMESTAMP,ContextTokens,
GeneratedTokens`; Patel et al., "Splitwise", ISCA 2024).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ellm_sgl.config.ranges import Range, shown

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTH_COLUMNS = ("prompt_tokens", "output_tokens")


class TraceError(ValueError):
    """A file that is no usable trace; the message names the file, the line and the remedy."""


LONGEST_TOKENS = 10**7
"""Of a prompt or an output: ten times the longest context of today's models."""
LONGEST_S = 10**9
"""From the first arrival to the last."""
_FACTORS = Range(0, 10**12, low_open=True)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in columns, in the order of their arrival."""

    at_s: FloatArray
    """Arrival, in seconds from the first one."""
    prompt_tokens: IntArray
    output_tokens: IntArray

    def __len__(self) -> int:
        return len(self.at_s)

    def first(self, count: int) -> Trace:
        """The first so many requests."""
        return self.part(0, count)

    def part(self, begin: int, end: int) -> Trace:
        """Requests from this one to before that one, as if nobody had come before them."""
        at_s = self.at_s[begin:end]
        return Trace(at_s - at_s[:1], self.prompt_tokens[begin:end], self.output_tokens[begin:end])

    def scaled(self, rate: float = 1.0, lengths: float = 1.0) -> Trace:
        """`rate` times the arrivals per second, `lengths` times the tokens (at least one each).

        Raises:
            ValueError: a factor is not above 0, or so small or large that arrivals or lengths are
                no longer those of any server.
        """
        for name, factor in (("rate", rate), ("lengths", lengths)):
            _FACTORS.check(f"the factor of the {name}", factor)
        with np.errstate(over="ignore"):
            at = self.at_s / rate
        if len(at) and not at[-1] <= LONGEST_S:
            raise ValueError(
                f"rate times {rate:g}: the last request would arrive after {at[-1]:.3g} s, more "
                f"than {LONGEST_S:,}; give a larger factor"
            )
        return Trace(at, _scaled(self.prompt_tokens, lengths), _scaled(self.output_tokens, lengths))


def _scaled(tokens: IntArray, factor: float) -> IntArray:
    longest = int(tokens.max(initial=0)) * factor
    if longest > LONGEST_TOKENS:
        raise ValueError(
            f"lengths times {factor:g}: a request would have {longest:.3g} tokens, more than "
            f"{LONGEST_TOKENS:,}; give a smaller factor"
        )
    return np.asarray(np.maximum(np.rint(tokens * factor), 1), np.int64)


def read_azure(path: Path) -> Trace:
    """A trace file of the Azure format; other columns are ignored.

    Requests that generate nothing, as some traces have, are left out.

    Raises:
        TraceError: no such file, columns are missing, it is empty or not sorted by time, or a
            value is no time or no number of tokens.
    """
    times: list[datetime] = []
    lengths: list[tuple[int, int]] = []
    for number, row in _rows(path, AZURE_COLUMNS):
        at = _time(path, number, row[0])
        if times and (at.tzinfo is None) != (times[0].tzinfo is None):
            raise TraceError(
                f"{path}, line {number}: {row[0]} names a time zone, or another line does; let all "
                "or none do"
            )
        if times and at < times[-1]:
            raise TraceError(f"{path}, line {number}: {row[0]} is before the line above; sort it")
        prompt = _tokens(path, number, AZURE_COLUMNS[1], row[1])
        output = _tokens(path, number, AZURE_COLUMNS[2], row[2])
        if prompt and output:
            times.append(at)
            lengths.append((prompt, output))
    if not times:
        raise TraceError(f"{path}: no requests in it")
    prompts, outputs = np.array(lengths, np.int64).T
    return Trace(np.array([(at - times[0]).total_seconds() for at in times]), prompts, outputs)


def read_lengths(path: Path) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens from a CSV file with columns `prompt_tokens,output_tokens`.

    Raises:
        TraceError: as `read_azure`.
    """
    lengths = [
        tuple(_tokens(path, number, name, text, 1) for name, text in zip(LENGTH_COLUMNS, row,
                                                                         strict=True))
        for number, row in _rows(path, LENGTH_COLUMNS)
    ]  # fmt: skip
    if not lengths:
        raise TraceError(f"{path}: no lengths in it")
    prompts, outputs = np.array(lengths, np.int64).T
    return prompts, outputs


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line number and the wanted columns of each line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if missing := [name for name in columns if name not in header]:
                raise TraceError(
                    f"{path}: no column {', '.join(missing)}; its first line must name "
                    f"{','.join(columns)}"
                )
            places = [header.index(name) for name in columns]
            for row in reader:
                if not row:
                    continue
                if len(row) < len(header):
                    raise TraceError(f"{path}, line {reader.line_num}: {len(row)} columns only")
                yield reader.line_num, [row[p] for p in places]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None


def _time(path: Path, line: int, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())  # of more than 6 digits it takes the first 6
    except ValueError:
        raise TraceError(
            f"{path}, line {line}: {shown(text)} is no time like 2023-11-16 18:15:46.68"
        ) from None


def _tokens(path: Path, line: int, column: str, text: str, least: int = 0) -> int:
    try:
        tokens = int(text)
    except ValueError:
        tokens = -1
    allowed = Range(least, LONGEST_TOKENS, whole=True)
    if tokens not in allowed:
        raise TraceError(f"{path}, line {line}: {column} is {shown(text)}; give {allowed}")
    return tokens
