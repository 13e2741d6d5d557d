"""Loads the compiled kernels, and says why where they cannot be."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any

import torch

from ellm_sgl.kernels.cpu.build import FOLDER, LIBRARY, source_hash

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
"""In the order of the table in api.cpp, each better than the one before."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`ellm::Dtype`."""

ISA_VARIABLE = "ELLM_SGL_CPU_ISA"
"""Environment: attention uses no better instruction set than this. For tests and comparisons."""

ANY_SIZE = 64
"""Of heads: no size has better instruction sets."""


class Call(Structure):
    """`ellm::Call` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "keys", "values", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_int64) for name in ("unit_stride", "token_stride", "out_rows")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "block_tokens")),
        *((name, c_int32) for name in ("row_type", "pool_type", "threads", "isa")),
        *((name, c_int32) for name in ("hint", "steps_ahead")),
        *((name, c_float) for name in ("scale", "delta")),
    )


class PlanArguments(Structure):
    """`ellm::PlanArguments` of plan.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("requests", "spans", "units")),
        *((name, c_void_p) for name in ("write_rows", "write_units", "write_offsets")),
        *((name, c_int64) for name in ("num_requests", "num_spans", "num_units")),
        *((name, c_int64) for name in ("num_writes", "first_write_row", "block_tokens")),
        *((name, c_int64) for name in ("groups", "largest_unit")),
    )


class Product(Structure):
    """`ellm::Product` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, c_int64) for name in ("x_stride", "rows", "size", "outputs")),
        *((name, c_int32) for name in ("type", "threads", "isa", "hint", "steps_ahead")),
    )


class Norm(Structure):
    """`ellm::Norm` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "weight", "out", "out_residual")),
        *((name, c_int64) for name in ("rows", "size")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("type", "threads", "isa")),
    )


class Rotation(Structure):
    """`ellm::Rotation` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "cosines", "positions")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "rows", "known_positions")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "turned")),
        *((name, c_int32) for name in ("type", "threads", "isa")),
    )


class Gate(Structure):
    """`ellm::Gate` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("rows", "size")),
        *((name, c_int32) for name in ("type", "threads", "isa")),
    )


class Layer(Structure):
    """`ellm::Layer` of decoder.h."""

    _fields_ = (
        ("input", Norm),
        ("qkv", Product),
        ("query", Norm),
        ("key", Norm),
        ("rotation", Rotation),
        ("attention", Call),
        ("out", Product),
        ("output", Norm),
        ("gate_up", Product),
        ("gate", Gate),
        ("down", Product),
        *((name, c_int64) for name in ("group", "ends_group")),
    )


class StepGroup(Structure):
    """`ellm::StepGroup` of decoder.h."""

    _fields_ = (
        ("plans", c_void_p),
        *((name, c_int64) for name in ("index", "rows", "rows_after")),
    )


class Step(Structure):
    """`ellm::Step` of decoder.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("groups", "positions", "embedded")),
        *((name, c_int32) for name in ("threads", "hint", "steps_ahead")),
        ("delta", c_float),
    )


class TransferArguments(Structure):
    """`ellm::TransferArguments` of transfer.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("to", "from_", "to_units", "from_units", "ends")),
        *((name, c_int64) for name in ("groups", "unit_bytes", "slots")),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ellm_instruction_set": (c_char_p, (c_int, c_int, POINTER(c_int32))),
    "ellm_make_plans": (c_void_p, (POINTER(PlanArguments),)),
    "ellm_free_plans": (None, (c_void_p,)),
    "ellm_attend": (None, (c_void_p, c_int64, POINTER(Call), c_int64)),
    "ellm_multiply": (None, (POINTER(Product),)),
    "ellm_normalise": (None, (POINTER(Norm),)),
    "ellm_rotate": (c_bool, (POINTER(Rotation),)),
    "ellm_gate": (None, (POINTER(Gate),)),
    "ellm_decode": (c_bool, (POINTER(Layer), c_int64, c_int64, POINTER(Step))),
    "ellm_copy_units": (None, (*[c_void_p] * 4, c_int64, c_int64, c_int)),
    "ellm_make_transfer": (c_void_p, ()),
    "ellm_transfer_start": (None, (c_void_p, POINTER(TransferArguments))),
    "ellm_transfer_wait": (c_double, (c_void_p, c_int64)),
    "ellm_transfer_done": (None, (c_void_p, c_int64)),
    "ellm_transfer_finish": (None, (c_void_p,)),
    "ellm_free_transfer": (None, (c_void_p,)),
}
"""What each function returns and takes."""


@dataclass(frozen=True)
class Loaded:
    """What became of loading the library."""

    library: ctypes.CDLL | None
    problem: str = ""
    """Why there is none."""


@functools.cache
def load() -> Loaded:
    """The library, loaded once per process; or why it cannot be used. Never raises."""
    path = FOLDER / LIBRARY
    if not path.exists():
        return Loaded(
            None, "not built: no C++ compiler when installing, one that failed, or a plain checkout"
        )
    try:
        library = ctypes.CDLL(str(path))
        library.ellm_sources.restype = c_char_p
        built_from = library.ellm_sources().decode()
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{path}: {error}")
    if built_from != source_hash():
        return Loaded(None, f"{path} was built from other sources than those beside it")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return Loaded(library)


def loaded() -> ctypes.CDLL:
    """The library.

    Raises:
        RuntimeError: it is not built, or cannot be used.
    """
    found = load()
    if found.library is None:
        raise RuntimeError(f"C++ kernels: {found.problem}")
    return found.library


@functools.cache
def instruction_set(head_dim: int, most: str | None = None) -> tuple[int, str] | None:
    """(index, name) of the best instruction set of this machine for heads of this size.

    Args:
        head_dim: heads whose size no vector divides (not a multiple of 4) have none.
        most: no better one than this. None: no limit.
    """
    limit = INSTRUCTION_SETS.index(most) if most else -1
    index = c_int32()
    name = loaded().ellm_instruction_set(limit, head_dim, ctypes.byref(index))
    return None if name is None else (index.value, name.decode())


@functools.cache
def best_instruction_set() -> int:
    """The index of the best there is, or of the environment's, for all but attention; what the
    environment says is read once."""
    found = instruction_set(ANY_SIZE, os.environ.get(ISA_VARIABLE))
    assert found is not None
    return found[0]
