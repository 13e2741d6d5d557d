"""Whatever is in a file that a user gives: a value comes of it, or one error in one line that names
the file; never a traceback of another kind."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ellm_sgl import host_file
from ellm_sgl.budget.file import LedgerFile
from ellm_sgl.budget.layout import SIZE, Row, pack_header, pack_row
from ellm_sgl.client.traces import LONGEST_TOKENS, TraceError, read_azure, read_lengths
from ellm_sgl.config import ENV, ConfigError, EllmConfig
from ellm_sgl.eval.simulator.machines import read_device, read_model
from ellm_sgl.policies import Policy
from ellm_sgl.policies.registry import create
from ellm_sgl.serve import config_file
from ellm_sgl.serve.cli import main
from tests.any_json import ODD_TEXT, VALUES

pytestmark = pytest.mark.slow

ONE_FILE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
"""Each example writes the test's file anew."""
LONGEST_MESSAGE = 1_000


def lines(columns: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    """CSV files with these columns among others, and cells of all kinds."""
    header = st.permutations([*columns, "who"])
    cell = ODD_TEXT | st.text(max_size=8) | st.integers(-1, 10**8).map(str)
    rows = st.lists(st.lists(cell, min_size=len(columns), max_size=5), max_size=4)
    return st.builds(
        lambda first, rest: "\n".join(",".join(row) for row in [first, *rest]).encode(
            errors="surrogatepass"
        ),
        header,
        rows,
    )


def json_of(*names: str) -> st.SearchStrategy[bytes]:
    """JSON objects with some of these names, and values of all kinds."""
    fields = st.dictionaries(st.sampled_from([*names, "other"]), VALUES)
    return (fields | VALUES).map(lambda value: json.dumps(value).encode())


def as_toml(value: object) -> str:
    """A value as TOML has it, or nearly so."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value) if value is not None else "1979-05-27T07:32:00Z"


NAMES = st.sampled_from(["kv_tokens", "kv-tokens", "device", "json", "prompt_tokens", "help"])
OPTIONS = st.dictionaries(NAMES | st.text(max_size=4), VALUES, max_size=3)
TABLES = st.dictionaries(
    st.sampled_from(["advise", "serve", "sglang", "bench", "policies", "nothing"]),
    OPTIONS | VALUES,
    max_size=3,
)
TOML = TABLES.map(
    lambda tables: "\n".join(f"{n} = {as_toml(v)}" for n, v in tables.items()).encode(
        errors="surrogatepass"
    )
)

DEVICE = ("name", "memory_bytes", "flops", "bytes_per_s", "link_bytes_per_s", "link_latency_s")
GOOD_DEVICE = json.dumps(
    {name: 1e12 for name in DEVICE[1:5]} | {"name": "made up", "link_latency_s": 1e-5}
).encode()
MODEL = ("num_attention_heads", "hidden_size", "num_hidden_layers", "num_key_value_heads",
         "head_dim", "intermediate_size", "vocab_size", "num_experts", "text_config",
         "torch_dtype", "moe_intermediate_size")  # fmt: skip


def ledger(path: Path) -> Any:
    file = LedgerFile(path, create=False)
    try:
        with file.locked():
            return file.read()
    finally:
        file.close()


LEDGER = st.builds(
    lambda row, at, byte: _with((pack_header(10**6) + pack_row(row)).ljust(SIZE, b"\0"), at, byte),
    st.none() | st.builds(Row, *[st.integers(0, 2**40)] * 2, st.text(max_size=5),
                          *[st.integers(0, 2**40)] * 4),
    st.integers(0, SIZE - 1),
    st.integers(0, 255),
)  # fmt: skip


def _with(data: bytes, at: int, byte: int) -> bytes:
    return data[:at] + bytes([byte]) + data[at + 1 :]


READERS: dict[str, tuple[Callable[[Path], Any], type[Exception], st.SearchStrategy[bytes]]] = {
    "trace": (read_azure, TraceError, lines(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))),
    "lengths": (read_lengths, TraceError, lines(("prompt_tokens", "output_tokens"))),
    "config": (lambda path: config_file.read(path, main), ConfigError, TOML),
    "device": (read_device, ConfigError, json_of(*DEVICE)),
    "model": (read_model, ConfigError, json_of(*MODEL)),
    "host tier": (
        host_file.check,
        ConfigError,
        st.binary(max_size=20).map(lambda end: host_file.MAGIC + end),
    ),
    "ledger": (ledger, ConfigError, LEDGER),
}
DEEP = [b"[" * 20_000, b'{"a":' * 20_000, b"a = " + b"[" * 20_000, b"a = " + b"{a = " * 20_000,
        b"[" + b"a." * 20_000 + b"a]"]  # fmt: skip
LONG = [b"a = " + b"9" * 5_000, b'{"flops": ' + b"9" * 5_000 + b"}"]
"""Numbers of more digits than Python reads."""


@pytest.mark.parametrize("kind", READERS)
@ONE_FILE
@given(data=st.data())
def test_a_value_or_one_error(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    read, error, documents = READERS[kind]
    content = data.draw(st.binary(max_size=200) | documents | st.sampled_from(DEEP))
    path = tmp_path / "given"
    path.write_bytes(content)
    message = str(path)
    try:
        read(path)
    except error as told:
        message = str(told)
    assert str(path) in message and "\n" not in message.strip(), message
    assert len(message) < LONGEST_MESSAGE + len(str(path)), message
    assert path.read_bytes() == content, "a file that was read has changed"


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("extreme", [*DEEP, *LONG], ids=lambda extreme: extreme[:6])
def test_what_is_nested_too_deeply_or_too_long_is_one_error(
    kind: str, extreme: bytes, tmp_path: Path
) -> None:
    read, error, _ = READERS[kind]
    path = tmp_path / "given"
    path.write_bytes(extreme)
    with pytest.raises(error) as told:
        read(path)
    assert str(path) in str(told.value)


TIMES = st.datetimes(datetime(2023, 11, 16), datetime(2023, 11, 17)).map(str)
COUNTS = st.one_of(st.integers(1, 5000), st.sampled_from([1, LONGEST_TOKENS]))


@ONE_FILE
@given(st.lists(st.tuples(TIMES, COUNTS, COUNTS), min_size=1, max_size=20), st.booleans())
def test_a_trace_is_read_if_it_is_in_the_order_of_its_times(
    tmp_path: Path, rows: list[tuple[str, int, int]], in_order: bool
) -> None:
    path = tmp_path / "trace.csv"
    written = [",".join(map(str, row)) for row in (sorted(rows) if in_order else rows)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *written]))
    times = [row.partition(",")[0] for row in written]
    if times != sorted(times):
        with pytest.raises(TraceError, match="is before the line above; sort it"):
            read_azure(path)
        return
    trace = read_azure(path)
    assert trace.at_s[0] == 0 and (trace.at_s[1:] >= trace.at_s[:-1]).all()
    read = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    assert sorted(read) == sorted((prompt, output) for _, prompt, output in rows)


@ONE_FILE
@given(lines(("TIMESTAMP", "ContextTokens", "GeneratedTokens")))
@example(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,7,5\n")
def test_what_is_read_of_a_trace_makes_sense(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    try:
        trace = read_azure(path)
    except TraceError:
        return
    assert len(trace) and trace.at_s[0] == 0 and (trace.at_s[1:] >= trace.at_s[:-1]).all()
    for tokens in (trace.prompt_tokens, trace.output_tokens):
        assert tokens.min() >= 1 and tokens.max() <= LONGEST_TOKENS


@ONE_FILE
@given(json_of(*DEVICE))
@example(GOOD_DEVICE)
@example(GOOD_DEVICE.replace(b"1000000000000.0", b"1e999", 1))
@example(json.dumps(dict.fromkeys(DEVICE[1:5], 1e12) | {"name": [1]}).encode())
def test_a_device_that_is_read_has_a_name_and_finite_numbers(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "device.json"
    path.write_bytes(content)
    try:
        device = read_device(path)
    except ConfigError:
        return
    assert isinstance(device.name, str)
    assert all(math.isfinite(v) for k, v in vars(device).items() if k != "name")


@ONE_FILE
@given(TOML)
def test_a_command_with_any_configuration_runs_or_says_one_error(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "ellm.toml"
    path.write_bytes(content)
    done = CliRunner().invoke(main, ["--config", str(path), "advise", "--device", "l4", "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if done.exit_code:
        assert done.stdout == "" and "rror: " in done.stderr.strip().splitlines()[-1], done.stderr
    else:
        json.loads(done.stdout)


SETTINGS = ("policy", "ratio", "options", "host_kv_tokens", "device_kv_tokens", "layer_group",
            "block_tokens", "overlap", "mode", "budget", "tpot_slo_ms")  # fmt: skip


@given(json_of(*SETTINGS) | st.sampled_from([deep for deep in DEEP if b"a = " not in deep]))
def test_settings_from_the_environment(content: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ConfigError):
        patch.setitem(os.environ, ENV, content.decode())
        assert isinstance(EllmConfig.from_env(), EllmConfig)


POLICIES = st.sampled_from(["fcfs", "slo-priority", "fixed-ratio", "stock", "", "nothing"])


@given(
    POLICIES, st.dictionaries(st.sampled_from(["ratio", "rotate"]) | st.text(max_size=4), VALUES)
)
def test_options_of_a_policy(name: str, options: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(create(name, options), Policy)
