"""Compiles the kernels for devices that are not there, and says what the code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ellm_sgl.kernels.experimental.triton.append import append_rows
from ellm_sgl.kernels.experimental.triton.attention import STAGES, WARPS, constants
from ellm_sgl.kernels.experimental.triton.copy import BLOCK, copy_parts
from ellm_sgl.kernels.experimental.triton.kernel import LISTS, NUMBERS, fused_attention

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

_POINTERS = {
    **dict.fromkeys(("write_rows", "write_units", "write_offsets"), "*i64"),
    **dict.fromkeys(("blocks", "tiles", "queues", "arrived"), "*i32"),
    **dict.fromkeys(("partial_sums", "partial_stats"), "*fp32"),
}
_NUMBERS = {
    **dict.fromkeys(("writes", "out_rows", "k1_programs"), "i32"),
    "scale": "fp32",
    **dict.fromkeys(("q_stride", "k_stride", "v_stride", "unit_stride", "token_stride"), "i32"),
}
_UNALIGNED = (*NUMBERS, *LISTS, "scale")
"""What changes from step to step: nothing is assumed of it."""


@dataclass(frozen=True)
class Compiled:
    """What the compiled kernel takes of a processor."""

    registers: int
    """Per thread."""
    spilled_bytes: int
    """Local memory per thread: registers that did not fit."""
    shared_bytes: int
    """Shared memory per program."""
    threads: int
    """Per program."""


def compile_for(
    capability: int, dtype: str, kv_heads: int, group: int, head_dim: int, block_tokens: int = 16
) -> Compiled:
    """Compile as `FusedAttention` would on a device of this compute capability (80, 90, ...).

    Args:
        dtype: "bf16", "fp16" or "fp32", of rows and pool.
        group: query heads per KV head.
    """
    constant = constants(kv_heads, group, head_dim, block_tokens, _BYTES[dtype])
    rows = dict.fromkeys(("q", "k", "v", "keys", "values", "out"), f"*{dtype}")
    signature = {**rows, **_POINTERS, **_NUMBERS, **dict.fromkeys(constant, "constexpr")}
    names = fused_attention.arg_names
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (names.index(name),): divisible
        for name in (*rows, *_POINTERS, *_NUMBERS)
        if name not in _UNALIGNED
    }
    source = ASTSource(
        fused_attention, {name: signature[name] for name in names}, constant, attributes
    )
    options = {"num_warps": WARPS, "num_stages": STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    return Compiled(registers, spilled, compiled.metadata.shared, 32 * WARPS)


def ptx_of_copies(capability: int) -> dict[str, str]:
    """Of the kernels that move KV, for heads of 128 in bf16."""
    row, unit = 5120, 163_840
    pools = dict.fromkeys(("k", "v", "keys", "values"), "*bf16")
    strides = dict.fromkeys(("k_stride", "v_stride", "unit_stride", "token_stride"), "i32")
    lists = {"units": "*i64", "offsets": "*i64"}
    parts = dict.fromkeys(("target", "source", "targets", "sources", "count"), "*i64")
    kernels = (
        (append_rows, pools | lists | strides, {"ROW": row, "BLOCK": 8192}, (*pools, *strides)),
        (
            copy_parts,
            parts,
            {"UNIT": unit, "PARTS": unit // BLOCK, "BLOCK": BLOCK},
            ("target", "source"),
        ),
    )
    return {
        kernel.fn.__name__: _ptx(kernel, signature, constant, aligned, capability)
        for kernel, signature, constant, aligned in kernels
    }


def _ptx(
    kernel: Any,
    signature: dict[str, str],
    constant: dict[str, int],
    aligned: Sequence[str],
    capability: int,
) -> str:
    names = kernel.arg_names
    types = signature | dict.fromkeys(constant, "constexpr")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, {name: types[name] for name in names}, constant, attributes)
    target = GPUTarget("cuda", capability, 32)
    found: str = triton.compile(source, target=target, options={"num_warps": 8}).asm["ptx"]
    return found


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread, as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
