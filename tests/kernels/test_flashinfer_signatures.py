"""The recorded signatures of FlashInfer: whether they still hold, and whether they are checked."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from tests.kernels import flashinfer_stand_in
from tests.kernels.flashinfer_stand_in import FACTS, signature

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("name", FACTS["functions"])
def test_flashinfer_has_the_recorded_signature(name: str) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed: CUDA hosts have it")
    found = inspect.signature(attrgetter(name)(importlib.import_module("flashinfer")))
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in found.parameters.values()]
    assert str(inspect.Signature(bare)) == str(signature(name))


def test_the_version_is_the_one_that_sglang_and_the_extra_name() -> None:
    pin = f"=={FACTS['version']}"
    theirs = metadata.requires("sglang") or []
    ours = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["cuda"]
    for requirements in (theirs, ours):
        named = [r for r in requirements if r.replace("_", "-").startswith("flashinfer-python")]
        assert len(named) == 1 and pin in named[0], requirements


def workspace() -> torch.Tensor:
    return torch.empty(16, dtype=torch.uint8)


def test_the_stand_in_takes_no_call_that_flashinfer_would_not() -> None:
    decode = flashinfer_stand_in.BatchDecodeWithPagedKVCacheWrapper
    with pytest.raises(TypeError):
        decode(workspace(), "NHD", tensor_cores=True)
    with pytest.raises(AssertionError):
        decode(workspace().float(), "NHD")
    with pytest.raises(AssertionError):
        decode(workspace(), "NHD", jit_args=[])
    wrapper = decode(workspace(), "NHD")
    indptr, pages, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [3], [2]))
    wrapper.plan(indptr, pages, last, 2, 1, 64, 16)
    for wrong in (
        (indptr.long(), pages, last),
        (indptr, pages[None], last),
        (indptr, pages, last.repeat(2)),
        (indptr, pages, last * 9),
    ):
        with pytest.raises(AssertionError):
            wrapper.plan(*wrong, 2, 1, 64, 16)
    with pytest.raises(TypeError):
        wrapper.plan(indptr, pages, last, 2, 1, 64)
    with pytest.raises(TypeError):
        wrapper.plan(indptr, pages, last, 2, 1, 64, 16, causal=True)
