#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the library and uses it as others would: docs/cpp.md's C++ example through find_package, then pkg-config.

Usage: install_test.py SOURCE_FOLDER BUILD_FOLDER. Exits with 0 if every step succeeds.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile


def run(*command, **options):
    print("$", *command, flush=True)
    return subprocess.run(command, check=True, text=True, **options)


def first_example(page: pathlib.Path) -> str:
    """The first C++ block of a page."""
    block = re.search(r"```cpp\n(.*?)```", page.read_text(), re.DOTALL)
    if block is None:
        sys.exit(f"{page} has no C++ example")
    return block.group(1)


def check_output(executable: pathlib.Path, environment=None):
    """The example prints the relative difference of approximate from exact attention."""
    printed = run(executable, capture_output=True, env=environment).stdout
    print(printed, end="")
    number = re.search(r"(\d+\.\d+)", printed)
    if number is None or not 0 < float(number.group(1)) < 1:
        sys.exit(f"the example printed {printed!r}; expected a relative difference between 0 and 1")


def main(source: pathlib.Path, build: pathlib.Path):
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        prefix = work / "prefix"
        example = work / "example.cpp"
        example.write_text(first_example(source / "docs/cpp.md"))
        run("cmake", "--install", build, "--prefix", prefix)

        run("cmake", "-S", source / "tests/install/consumer", "-B", work / "consumer", "-G", "Ninja",
            f"-DCMAKE_PREFIX_PATH={prefix}", f"-DEXAMPLE={example}")
        run("cmake", "--build", work / "consumer")
        check_output(work / "consumer" / "example")

        libdir = next(prefix.glob("lib*/**/distr.pc")).parent.parent
        environment = dict(os.environ, PKG_CONFIG_PATH=str(libdir / "pkgconfig"), LD_LIBRARY_PATH=str(libdir))
        flags = run("pkg-config", "--cflags", "--libs", "distr", capture_output=True, env=environment).stdout.split()
        run("c++", "-std=c++20", example, "-o", work / "example", *flags)
        check_output(work / "example", environment)

        run(prefix / "bin" / "distr", "--version")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve())
