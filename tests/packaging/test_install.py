"""The same imports from a checkout, an editable install and the wheel; and what the wheel holds.

Everything happens in copies under pytest's temporary folder; no registry is asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from ellm_sgl.kernels.cpu.build import LIBRARY, BuildError, find_compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("policies", "kernels", "eval")
IMPORTS = ("ellm_sgl", *(f"ellm_sgl.{name}" for name in LINKED))


def run(*command: object, cwd: Path, **env: str) -> str:
    """Run a command free of the caller's Python path; its output, or a failure that shows it."""
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a commit of the working tree would hold: building it leaves nothing in the real one."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    copy = tmp_path_factory.mktemp("checkout")
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):  # deleted, and not yet committed, otherwise
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def dist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=checkout)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install -e` makes and installs (PEP 660)."""
    folder = tmp_path_factory.mktemp("editable")
    hook = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run(sys.executable, "-c", hook, folder, cwd=checkout)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the packages of the running environment, less its own ellm-sgl."""
    folder = tmp_path_factory.mktemp("dependencies")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "ellm_sgl" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


class Environment:
    """A throw-away virtual environment that sees `dependencies` behind its own packages."""

    def __init__(self, folder: Path, dependencies: Path, wheel: Path | None = None) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python3*/site-packages"))
        if wheel is not None:
            pip = (sys.executable, "-m", "pip", "--python", self.python)
            run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
        self.installed = {entry.name for entry in self.site.iterdir()}
        (self.site / "dependencies.pth").write_text(f"{dependencies}\n")

    def origins(self, cwd: Path, **env: str) -> list[Path]:
        """Import all of `IMPORTS`; the folders they came from, links resolved."""
        code = (
            "import importlib, sys\n"
            "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
        )
        lines = run(self.python, "-c", code, *IMPORTS, cwd=cwd, **env).splitlines()
        return [Path(line).resolve().parent for line in lines]

    def finds(self, name: str, cwd: Path) -> bool:
        """Whether `import name` would find something of this environment's own packages."""
        code = (
            "import importlib.util, sys\nspec = importlib.util.find_spec(sys.argv[1])\nprint(spec)"
        )
        return str(self.site.parent) in run(self.python, "-c", code, name, cwd=cwd)

    def entry_points(self, group: str, cwd: Path) -> set[str]:
        code = (
            "import sys; from importlib.metadata import entry_points\n"
            "for point in entry_points(group=sys.argv[1]): print(point.name, point.value)"
        )
        return set(run(self.python, "-c", code, group, cwd=cwd).splitlines())


def test_wheel_installs_one_package_of_real_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    top = {name.split("/")[0] for name in infos}
    assert top == {"ellm_sgl", next(name for name in top if name.endswith(".dist-info"))}
    for name in LINKED:
        assert infos[f"ellm_sgl/{name}/__init__.py"].file_size > 0
    assert infos["ellm_sgl/demo_model/model.safetensors"].file_size > 100_000
    assert "ellm_sgl/py.typed" in infos
    assert not any(name.endswith(".pth") for name in infos)


def test_wheel_says_and_holds_its_licences(wheel: Path) -> None:
    """The PSF's, which the demo model's text is under, asks for its text and notice."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("info/METADATA")]
        said = archive.read(metadata).decode()
        licences = metadata.replace("METADATA", "licenses")
        for name in ("LICENSE", "ellm_sgl/demo_model/LICENSE"):
            assert f"License-File: {name}\n" in said
            assert archive.read(f"{licences}/{name}") == (ROOT / name).read_bytes()
        beside = archive.read("ellm_sgl/demo_model/LICENSE").decode()
    assert "License-Expression: Apache-2.0 AND PSF-2.0\n" in said
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in beside
    assert re.search(r"Copyright \(c\) 2001[0-9, \n]* Python Software Foundation;", beside)


def test_wheel_holds_whatever_the_checkout_holds(checkout: Path, wheel: Path) -> None:
    """No module of a folder without __init__.py, no data file of a forgotten kind, is left out."""
    expected = set()
    for folder in ("ellm_sgl", *LINKED):
        for path in (checkout / folder).rglob("*"):
            if path.is_file() and path.suffix not in {".md", ".pyc"}:
                name = path.relative_to(checkout).as_posix()
                expected.add(name if folder == "ellm_sgl" else f"ellm_sgl/{name}")
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist()), expected - set(archive.namelist())


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
def test_wheel_and_editable_install_hold_the_cpp_kernels(
    checkout: Path, wheel: Path, editable: Path, dependencies: Path, tmp_path: Path
) -> None:
    code = "from ellm_sgl.kernels.cpu.library import loaded; print(loaded())"
    for name, built in {"wheel": wheel, "editable": editable}.items():
        env = Environment(tmp_path / name, dependencies, built)
        assert LIBRARY in run(env.python, "-c", code, cwd=tmp_path)


@pytest.mark.usefixtures("compiler")
def test_the_wheel_is_one_for_many_linuxes(wheel: Path, tmp_path: Path) -> None:
    """It needs nothing but the system's libraries, and nothing is put into it. As `make wheel`."""
    pytest.importorskip("auditwheel")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    repair = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, wheel)
    run(*repair, cwd=tmp_path, PATH=path)
    [repaired] = tmp_path.glob("*.whl")
    assert "-cp311-abi3-manylinux_2_" in repaired.name
    with zipfile.ZipFile(repaired) as archive, zipfile.ZipFile(wheel) as before:
        assert {f"ellm_sgl/kernels/cpu/{LIBRARY}"} == {n for n in archive.namelist() if ".so" in n}
        files = {name for name in archive.namelist() if not name.endswith("/")}
        assert files == set(before.namelist())
        library = archive.read(f"ellm_sgl/kernels/cpu/{LIBRARY}")
    for instructions in (b"portable", b"avx2", b"avx512"):
        assert instructions in library


def test_it_works_beside_a_plain_sglang(wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    """What `doctor` sees of the wheel in an environment with SGLang's packages."""
    env = Environment(tmp_path / "venv", dependencies, wheel)
    done = subprocess.run(
        [env.python, "-m", "ellm_sgl.serve.cli", "doctor", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert set(found) >= {"python", "torch", "sglang", "platform", "attention", "hooks"}
    for name in ("python", "torch", "sglang", "hooks", "demo model"):
        assert found[name]["ok"], found[name]
    assert str(env.site) in found["demo model"]["found"]


@pytest.mark.parametrize(
    ("version", "fits"), [("3.10", False), ("3.11", True), ("3.12", True), ("3.13", False)]
)
def test_each_python(wheel: Path, tmp_path: Path, version: str, fits: bool) -> None:
    """Where the pinned packages exist it installs and compiles; elsewhere pip says why not."""
    python = interpreter(version)
    run(python, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    own = tmp_path / "venv/bin/python"
    install = (sys.executable, "-m", "pip", "--python", own, "install", "-q", "--no-index")
    if not fits:
        with pytest.raises(AssertionError, match=r"different Python|not a supported wheel"):
            run(*install, "--no-deps", wheel, cwd=tmp_path)
        return
    run(*install, "--no-deps", wheel, cwd=tmp_path)
    site = next((tmp_path / "venv").glob("lib/python3*/site-packages"))
    run(own, "-W", "error", "-m", "compileall", "-q", site / "ellm_sgl", cwd=tmp_path)
    run(own, "-c", "import ellm_sgl; assert ellm_sgl.__version__ != '0+checkout'", cwd=tmp_path)


def interpreter(version: str) -> Path:
    """Of this version, if the machine has one that runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    found = [] if on_path is None else [Path(on_path)]
    for each in (*found, *pyenv.glob(f"{version}.*/bin/python")):
        said = subprocess.run([each, "-V"], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.startswith(f"Python {version}."):
            return each
    pytest.skip(f"no Python {version} here")


def test_installs_without_a_compiler(checkout: Path, dependencies: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkout, source, symlinks=True, ignore=shutil.ignore_patterns("*.so", "build"))
    hook = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    said = run(sys.executable, "-c", hook, tmp_path, cwd=source, CXX=str(tmp_path / "no-compiler"))
    assert "kernels are left out" in said
    env = Environment(tmp_path / "venv", dependencies, next(tmp_path.glob("*.whl")))
    code = "from ellm_sgl.kernels.cpu.library import load; print(load().problem)"
    assert "not built" in run(env.python, "-c", code, cwd=tmp_path)


def test_sdist_holds_no_links(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    assert any(member.name.endswith("/ellm_sgl/kernels/__init__.py") for member in members)


def test_imports_from_the_wheel(wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    before = Environment(tmp_path / "empty", dependencies).installed
    env = Environment(tmp_path / "venv", dependencies, wheel)
    added = env.installed - before
    assert added == {"ellm_sgl", next(name for name in added if name.endswith(".dist-info"))}
    package = env.site / "ellm_sgl"
    assert env.origins(tmp_path) == [package, *(package / name for name in LINKED)]
    assert env.finds("ellm_sgl", tmp_path)
    for name in (*LINKED, "tests"):
        assert not env.finds(name, tmp_path), f"the wheel installs a top-level {name}"
    for group, point in {
        "console_scripts": "ellm-sgl ellm_sgl.serve.cli:main",
        "sglang.srt.platforms": "ellm_cpu ellm_sgl.sglang.platform_entry:activate",
        "sglang.srt.plugins": "ellm ellm_sgl.sglang.plugin:register",
        "ellm_sgl.policies": "fixed-ratio ellm_sgl.policies.fixed_ratio:FixedRatio",
    }.items():
        assert point in env.entry_points(group, tmp_path)


def test_imports_from_an_editable_install(
    checkout: Path, editable: Path, dependencies: Path, tmp_path: Path
) -> None:
    env = Environment(tmp_path / "venv", dependencies, editable)
    folders = [checkout / "ellm_sgl", *(checkout / name for name in LINKED)]
    assert env.origins(tmp_path) == folders


def test_imports_from_a_checkout(checkout: Path, dependencies: Path, tmp_path: Path) -> None:
    env = Environment(tmp_path / "venv", dependencies)
    folders = [checkout / "ellm_sgl", *(checkout / name for name in LINKED)]
    assert env.origins(checkout) == folders
    assert env.origins(tmp_path, PYTHONPATH=str(checkout)) == folders


def test_the_folder_kernels_is_not_taken_for_hugging_face_kernels(
    checkout: Path, dependencies: Path, tmp_path: Path
) -> None:
    """With the checkout as working directory, transformers finds our folder `kernels`, and fails
    unless that folder has a version to decline."""
    env = Environment(tmp_path / "venv", dependencies)
    code = "from transformers.utils import is_kernels_available; assert not is_kernels_available()"
    run(env.python, "-c", code, cwd=checkout)
