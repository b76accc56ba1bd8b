#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the package's operators with the headers of the oldest torch that is promised, and looks for what they need.

Usage: oldest_torch_test.py SOURCE_FOLDER BUILD_FOLDER OPERATORS.so
       oldest_torch_test.py --download BUILD_FOLDER

BUILD_FOLDER is a release build, which lends its objects; torch lies in BUILD_FOLDER/torch-2.10. Every function of torch
that OPERATORS.so and the new build need is one of that torch's libraries, and older headers are refused in words.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

VERSION = "2.10"
# The smallest of the wheels for Linux: headers and names are the same on every processor.
WHEEL = ("--platform", "manylinux_2_28_aarch64", "--python-version", "3.11", "--only-binary=:all:", "--no-deps")


def run(*command, **options):
    return subprocess.run(command, check=True, text=True, **options)


def download(folder: pathlib.Path):
    """The headers and the library of torch, and no more of its wheel."""
    if (folder / "complete").exists():
        return
    with tempfile.TemporaryDirectory() as wheels:
        run(folder.parent / "venv/bin/pip", "download", "--quiet", *WHEEL, "-d", wheels, f"torch=={VERSION}.0")
        with zipfile.ZipFile(next(pathlib.Path(wheels).glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist()
                                      if name.startswith("torch/include/") or name == "torch/lib/libtorch_cpu.so"])
    (folder / "complete").touch()


def names(kind: str, library: pathlib.Path) -> set[str]:
    printed = run("nm", "-D", kind, library, capture_output=True).stdout
    return {line.split()[-1].split("@")[0] for line in printed.splitlines()}


def check_names(operators: pathlib.Path, torch: pathlib.Path):
    wanted = {name for name in names("--undefined-only", operators) if re.match(r"aoti_torch_|torch_", name)}
    missing = wanted - names("--defined-only", torch / "lib/libtorch_cpu.so")
    print(f"{operators}: {len(wanted)} functions of torch")
    if not wanted or missing:
        sys.exit(f"{operators} needs of torch {VERSION}: {sorted(missing) or 'nothing at all'}")


def configure(source, build, include, *options, **arguments):
    return subprocess.run(
        ["cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DDISTR_WERROR=ON",
         "-DDISTR_CLI=OFF", "-DDISTR_TESTS=OFF", "-DDISTR_CUDA=OFF", "-DDISTR_PYTHON=ON",
         f"-DDISTR_TORCH_INCLUDE={include}", *options], text=True, **arguments)


def check_refusal(source: pathlib.Path):
    """Headers of an older torch stop the configuration, before anything is compiled."""
    with tempfile.TemporaryDirectory() as folder:
        include = pathlib.Path(folder) / "include/torch"
        for name, text in (("csrc/stable/library.h", ""), (
                "headeronly/version.h", "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n")):
            (include / name).parent.mkdir(parents=True)
            (include / name).write_text(text)
        result = configure(source, pathlib.Path(folder) / "build", include.parent, capture_output=True)
        words = " ".join(result.stderr.split())
        if result.returncode == 0 or f"are those of torch 2.9; allowed: {VERSION} and later" not in words:
            sys.exit(f"headers of torch 2.9 were not refused: {words}")


def main(source: pathlib.Path, build: pathlib.Path, operators: pathlib.Path):
    torch = build / f"torch-{VERSION}" / "torch"
    oldest = build / "oldest-torch"
    configure(source, oldest, torch / "include", f"-DDISTR_OBJECTS_FROM={build}", check=True)
    run("cmake", "--build", oldest, "--target", "distrattention_ops")
    check_names(oldest / "python/libdistrattention_ops.so", torch)
    check_names(operators, torch)
    check_refusal(source)


if __name__ == "__main__":
    if sys.argv[1] == "--download":
        download(pathlib.Path(sys.argv[2]).resolve() / f"torch-{VERSION}")
    else:
        main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:]))
