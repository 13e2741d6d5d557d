"""Builds the C++ kernels of kernels/cpu; all else is in pyproject.toml.

Where no compiler is found, or it fails, the install goes on without them and says so: attention
then runs on PyTorch's kernels (`ellm-sgl doctor` tells).
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# By path: importing ellm_sgl may need more than the build has.
BUILD = runpy.run_path(str(Path(__file__).parent / "ellm_sgl/kernels/cpu/build.py"))


class BuildKernels(build_ext):
    """Compiles with kernels/cpu/build.py, which also serves a plain checkout."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / BUILD["LIBRARY"])

    def build_extension(self, ext: Extension) -> None:
        try:
            BUILD["build"](Path(self.get_ext_fullpath(ext.name)).resolve())
        except BUILD["BuildError"] as error:
            self.warn(f"the C++ attention kernels are left out: {error}")


# optional: setuptools, too, accepts that the file is not there.
kernels = Extension("ellm_sgl.kernels.cpu.libellm_cpu", sources=[], optional=True)
setup(
    ext_modules=[kernels],
    cmdclass={"build_ext": BuildKernels},
    # The library knows nothing of Python: one wheel for every version from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
