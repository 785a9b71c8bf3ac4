"""Builds the C kernels with the package, which installs without them where there is no compiler."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent


def load_builder():
    """`treadle/backends/build.py` by its path: importing `treadle` would need its dependencies."""
    name = "treadle_build"
    spec = importlib.util.spec_from_file_location(name, ROOT / "treadle" / "backends" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Puts one library for each instruction set beside the backends."""

    def run(self):
        builder = load_builder()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        root = ROOT if in_place else Path(self.build_lib)
        self.libraries_built = builder.build(root / builder.LIBRARY_FOLDER.relative_to(ROOT))
        compiler = builder.find_compiler()
        print(
            builder.report(self.libraries_built, bool(compiler and compiler.threaded)), flush=True
        )

    def get_outputs(self):
        return [str(r.path) for r in getattr(self, "libraries_built", []) if r.path]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []


class PlatformWheel(bdist_wheel):
    """Kernels are plain shared libraries: they need a platform, but no particular Python."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    # Never compiled by setuptools; it is here so that setuptools runs build_ext at all.
    ext_modules=[Extension("treadle.backends.lib", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
