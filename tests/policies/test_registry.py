"""Policies by name, from entry points of packages that really lie on the path."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import shown
from ellm_sgl.policies import FixedRatio, Stock
from ellm_sgl.policies.registry import create, installed, load, provider

Register = Callable[..., None]
SOURCE = """
from ellm_sgl.policies import FixedRatio, Policy

class Half(FixedRatio):
    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__(0.5 * scale)

class Unfinished(Policy):
    def batch(self, state): ...

not_a_policy = 7
"""


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Makes an installed package that registers policies of a module `their_policies_N`."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = iter(f"their_policies_{abs(hash(tmp_path))}_{i}" for i in range(9))

    def make(package: str, source: str = SOURCE, **policies: str) -> None:
        module = next(modules)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        entries = [f"{name.replace('_', '-')} = {module}:{cls}" for name, cls in policies.items()]
        (info / "entry_points.txt").write_text("\n".join(["[ellm_sgl.policies]", *entries]))

    return make


def test_the_built_in_ones_are_installed() -> None:
    found = installed()
    assert list(found) == sorted(found)
    assert found["fixed-ratio"].load() is FixedRatio
    assert found["stock"].load() is Stock
    assert provider(found["stock"]).startswith("ellm-sgl ")


def test_a_policy_of_another_package(register: Register) -> None:
    register("theirs", their_half="Half")
    assert provider(installed()["their-half"]) == "theirs 1.2"
    assert load("their-half").__name__ == "Half"
    assert isinstance(create("their-half", {"scale": 0.5}), FixedRatio)


def test_listing_imports_nothing(register: Register) -> None:
    register("theirs", source="raise RuntimeError", their_half="Half")
    assert "their-half" in installed()


@pytest.mark.parametrize(
    ("cls", "options", "told"),
    [
        ("Half", {"scael": 1}, r"unexpected keyword argument 'scael' .* Half takes \(\*, scale: "),
        ("Half", {"scale": 2}, r"refuses its options {'scale': 2}: ValueError: ratio must be"),
        ("Half", {"scale": "x"}, "refuses its options .*: TypeError: "),
        ("Unfinished", {}, r"Unfinished does not implement \['ratio', 'split'\]"),
        ("not_a_policy", {}, "of theirs 1.2 is 7; it must be a subclass of .*Policy"),
        ("Missing", {}, "of theirs 1.2 cannot be imported: AttributeError: .*'Missing'"),
    ],
)
def test_a_policy_that_cannot_be_made(
    register: Register, cls: str, options: dict[str, object], told: str
) -> None:
    register("theirs", theirs=cls)
    with pytest.raises(ConfigError, match=f"policy 'theirs'.*{told}"):
        create("theirs", options)


def test_a_plugin_that_does_not_import(register: Register) -> None:
    register("theirs", source="import no_such_module", theirs="Half")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        create("theirs", {})


HANGS = """
import time
from ellm_sgl.policies import Stock

class Hangs(Stock):
    def __init__(self) -> None:
        time.sleep(30)

class Leaves(Stock):
    def __init__(self) -> None:
        raise SystemExit(5)
"""


def test_a_constructor_that_hangs_is_given_up_after_the_limit(register: Register) -> None:
    register("theirs", source=HANGS, theirs="Hangs")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"policy 'theirs' is not ready after 0\.05 s: .*hangs"):
        create("theirs", {}, 0.05)
    assert time.monotonic() - began < 10


def test_an_import_that_hangs_is_given_up_too(register: Register) -> None:
    register("theirs", source="import time\ntime.sleep(30)", theirs="Stock")
    with pytest.raises(ConfigError, match=r"policy 'theirs' is not ready after 0\.05 s"):
        create("theirs", {}, 0.05)


def test_a_constructor_that_tries_to_end_the_process_is_refused(register: Register) -> None:
    register("theirs", source=HANGS, theirs="Leaves")
    with pytest.raises(ConfigError, match="policy 'theirs' cannot be made: SystemExit: 5"):
        create("theirs", {})


@pytest.mark.parametrize(
    "options",
    [{"scale": math.nan}, {"scale": math.inf}, {"scale": [1, {"deeper": -math.inf}]}],
    ids=str,
)
def test_no_policy_is_given_a_number_that_is_not_finite(
    register: Register, options: dict[str, object]
) -> None:
    register("theirs", source=SOURCE.replace("scale: float", "scale: object"), theirs="Half")
    with pytest.raises(
        ConfigError, match=r"'theirs': option \w+: -?(nan|inf) is not a finite number"
    ):
        create("theirs", options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fcfs", {name: value})
        for name in ("forecast", "pause", "rotate") for value in (1, 0.0, "true", None)
    ] + [
        ("fcfs", {"solver": True}), ("slo-priority", {"loss": True}),
        ("slo-priority", {"loss": 1}), ("fixed-ratio", {"ratio": "0.5"}),
        ("fixed-ratio", {"ratio": False}), ("fixed-ratio", {"ratio": 10**400}),
        ("fixed-ratio", {"layers": [0.5, math.pi]}), ("fixed-ratio", {"layers": 3}),
    ],
    ids=shown,
)  # fmt: skip
def test_the_built_in_ones_refuse_numbers_that_make_no_sense(
    name: str, options: dict[str, object]
) -> None:
    (option,) = options
    with pytest.raises(ConfigError, match=f"policy '{name}' refuses its options .*{option}") as no:
        create(name, options)
    assert len(str(no.value)) < 500


def test_a_name_that_two_packages_claim(register: Register) -> None:
    register("theirs", fixed_ratio="Half")
    told = re.escape("policy 'fixed-ratio' is registered by several packages: ")
    with pytest.raises(ConfigError, match=f"{told}.*theirs 1.2.*keep one"):
        create("fixed-ratio", {})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'fcsf'; installed: .*fixed-ratio.*stock"):
        create("fcsf", {})
