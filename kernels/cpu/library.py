"""Loads the compiled kernels, and says why where they cannot be."""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)
from dataclasses import dataclass

from ellm_sgl.kernels.cpu.build import FOLDER, LIBRARY, source_hash

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512bf16")
"""In the order of the table in api.cpp, each better than the one before."""

ISA_VARIABLE = "ELLM_SGL_CPU_ISA"
"""Environment: attention uses no better instruction set than this. For tests and comparisons."""


class Call(Structure):
    """`ellm::Call` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "keys", "values", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_int64) for name in ("unit_stride", "token_stride", "out_rows")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "block_tokens")),
        *((name, c_int32) for name in ("row_type", "pool_type", "threads", "isa")),
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


class TransferArguments(Structure):
    """`ellm::TransferArguments` of transfer.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("to", "from_", "to_units", "from_units", "ends")),
        *((name, c_int64) for name in ("groups", "unit_bytes", "slots")),
    )


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
        return Loaded(None, "not built: no C++ compiler when installing, or a plain checkout")
    try:
        library = ctypes.CDLL(str(path))
        library.ellm_sources.restype = c_char_p
        built_from = library.ellm_sources().decode()
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{path}: {error}")
    if built_from != source_hash():
        return Loaded(None, f"{path} was built from other sources than those beside it")
    library.ellm_instruction_set.restype = c_char_p
    library.ellm_instruction_set.argtypes = (c_int, c_int, POINTER(c_int32))
    library.ellm_make_plans.restype = c_void_p
    library.ellm_make_plans.argtypes = (POINTER(PlanArguments),)
    library.ellm_free_plans.restype = None
    library.ellm_free_plans.argtypes = (c_void_p,)
    library.ellm_attend.restype = None
    library.ellm_attend.argtypes = (c_void_p, c_int64, POINTER(Call), c_int64)
    library.ellm_copy_units.restype = None
    library.ellm_copy_units.argtypes = (
        c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int,
    )  # fmt: skip
    library.ellm_make_transfer.restype = c_void_p
    library.ellm_make_transfer.argtypes = ()
    library.ellm_transfer_start.restype = None
    library.ellm_transfer_start.argtypes = (c_void_p, POINTER(TransferArguments))
    library.ellm_transfer_wait.restype = c_double
    library.ellm_transfer_wait.argtypes = (c_void_p, c_int64)
    library.ellm_transfer_done.restype = None
    library.ellm_transfer_done.argtypes = (c_void_p, c_int64)
    for function in (library.ellm_transfer_finish, library.ellm_free_transfer):
        function.restype = None
        function.argtypes = (c_void_p,)
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
