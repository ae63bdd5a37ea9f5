"""Declares the optional native library rlplus/_C.so; everything else stands in pyproject.toml.

It is plain C++ without torch or Python, loaded through ctypes, so building it needs a compiler and nothing else, and
one build serves every version of Python and torch. Without a compiler, or when the build fails, the installation goes
on without it. RLPLUS_EXT=1 makes a failure fatal, RLPLUS_EXT=0 does not try.
"""

import os
import platform
import shlex
import shutil

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

MODE = os.environ.get("RLPLUS_EXT", "")
if MODE not in ("", "0", "1"):
    raise ValueError(f"want RLPLUS_EXT 0, 1 or nothing; got {MODE!r}")
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")


COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class BuildLibrary(build_ext):
    def build_extensions(self) -> None:
        # Not the compiler and flags that this Python was built with: they may not exist here.
        command = shlex.split(COMPILER or "c++")
        self.compiler.set_executables(compiler_so_cxx=[*command, "-fPIC"], linker_so_cxx=[*command, "-shared"])
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


library = Extension(
    "rlplus._C",
    ["csrc/gemm.cpp", "csrc/rows.cpp"],
    depends=["csrc/numbers.h"],
    language="c++",
    extra_compile_args=FLAGS,
    extra_link_args=["-fopenmp"],
    optional=MODE != "1",
)
wanted = MODE == "1" or (MODE == "" and COMPILER is not None)
setup(
    ext_modules=[library] if wanted else [],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)
