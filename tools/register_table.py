#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Registers, shared memory, spills and occupancy of every CUDA kernel, from the compiler's own report.

Usage: register_table.py BUILD [--launches FILE.json]
         Prints a Markdown table of the kernels that BUILD was compiled to. Exit status: 0; 1 if a kernel spills,
         or waits after every wgmma, or more than 128 shapes of the kernels were compiled; 2 if BUILD holds no report.
         --launches: what `distr_gpu check --launches` wrote on a GPU adds threads, dynamic shared memory, and how
         many blocks an SM holds.
       register_table.py --compile NVCC ARGUMENT...
         Runs the compiler and keeps its report beside the object, as OBJECT.ptxas; the build calls it so
         (cmake/cuda.cmake). Exit status: the compiler's.
"""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Parts of the names of the kernels that are compiled in many shapes (the forwards and the backwards), and how many
# shapes they may have together.
SHAPED = ("sm807forward", "sm8012near_forward", "sm907forward", "sm9013forward_voted",
          "sm9016forward_near_far", "sm908backward", "ShapeI")
MAX_SHAPES = 128
# Kernels with parts of namespace distr::test (ablations), which only a test program has.
TEST_ONLY = re.compile(r"(?<!\d)4test")

ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\w+)' for '(?P<target>sm_\w+)'")
PROPERTIES = re.compile(r"Function properties for (\w+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
SERIALIZED = re.compile(r"wgmma.mma_async instructions are serialized due to (?P<why>.*?) (?:in|for) (?:the )?"
                        r"function '(?P<kernel>\w+)'")
NOISE = re.compile(r"ptxas info|^\s+\d+ bytes stack frame|^\s*$")


@dataclass
class Kernel:
    name: str  # as the linker knows it
    target: str
    registers: int = 0
    shared: int = 0  # bytes of static shared memory
    local: int = 0  # bytes of local memory: arrays that are not in registers, and spills
    spills: int = 0  # bytes stored and loaded
    serialized: str = ""  # why the compiler waits after every wgmma


def parse(report):
    """The kernels of one object's report."""
    kernels, current, own = [], None, False
    for line in report.splitlines():
        if match := ENTRY.search(line):
            current = Kernel(match["kernel"], match["target"])
            kernels.append(current)
        elif match := PROPERTIES.search(line):
            own = current is not None and match[1] == current.name
        elif (match := FRAME.search(line)) and current is not None:
            frame, stores, loads = map(int, match.groups())
            current.spills += stores + loads  # also those of functions that it calls
            current.local = max(current.local, frame) if own else current.local + frame
        elif (match := USED.search(line)) and current is not None:
            current.registers = int(match[1])
            shared = SHARED.search(line)
            current.shared = int(shared[1]) if shared else 0
    whys = {match["kernel"]: match["why"] for match in SERIALIZED.finditer(report)}
    for kernel in kernels:
        kernel.serialized = whys.get(kernel.name, "")
    return kernels


def readable(names):
    """Names as in the source, without what all of them share."""
    text = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    result = []
    for name in text.splitlines():
        name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|distr::(cuda|test)::|^void ", "", name)
        name = re.sub(r"\([\w:]*\)(?=\d)", "", name)  # (int)64
        name = re.sub(r"^([^(]*?)\(.*\)$", r"\1", name)
        result.append(name.replace("__nv_bfloat16", "bf16").replace("__half", "f16").replace("> >", ">>"))
    return dict(zip(names, result, strict=True))


def table(kernels, launches):
    """Markdown lines, one for each kernel (and each of its `launches`, from read_launches())."""
    names = readable(sorted({kernel.name for kernel in kernels}))
    targets = sorted({kernel.target for kernel in kernels})
    head = ["kernel", *(f"registers {target}" for target in targets), "static shared", "local", "spilled"]
    head += ["threads", "dynamic shared", "blocks an SM", "threads an SM"] if launches else []
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name in sorted(names, key=names.get):
        found = {kernel.target: kernel for kernel in kernels if kernel.name == name}
        cells = [f"`{names[name]}`", *(found[target].registers if target in found else "-" for target in targets)]
        cells += [max(getattr(kernel, key) for kernel in found.values()) for key in ("shared", "local", "spills")]
        for launch in launches.get(name, [None]) if launches else [{}]:
            facts = ["-"] * 4 if launch is None else []
            if launch:
                blocks, threads = launch["blocks_per_sm"], launch["threads"]
                facts = [threads, launch["dynamic_shared_bytes"], blocks, blocks * threads]
            lines.append("| " + " | ".join(map(str, cells + facts)) + " |")
    return lines


def read_launches(path):
    """The launches of each kernel, by its name; those of the GPU that FILE was made on."""
    result = {}
    for launch in json.loads(Path(path).read_text())["launches"] if path else []:
        result.setdefault(launch["kernel"], []).append(launch)
    return result


def compile_and_keep(command):
    """Runs nvcc with ptxas's report on, which it takes out of what the compiler prints."""
    result = subprocess.run([*command, "-Xptxas=-v"], stderr=subprocess.PIPE, text=True)
    sys.stderr.write("".join(line for line in result.stderr.splitlines(True) if not NOISE.search(line)))
    if result.returncode == 0 and "-o" in command:
        Path(command[command.index("-o") + 1] + ".ptxas").write_text(result.stderr)
    return result.returncode


def main(arguments):
    if arguments[:1] == ["--compile"]:
        return compile_and_keep(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--launches")
    options = parser.parse_args(arguments)
    # Of objects that still are: a report outlives a source that was removed.
    reports = [path for path in sorted(options.build.rglob("*.ptxas")) if path.with_suffix("").exists()]
    kernels = [kernel for path in reports for kernel in parse(path.read_text())]
    kernels = [kernel for kernel in kernels if not TEST_ONLY.search(kernel.name)]
    if not kernels:
        print(f"{options.build} holds no report of CUDA kernels (OBJECT.ptxas); build the preset cuda", file=sys.stderr)
        return 2
    launches = read_launches(options.launches)
    print("\n".join(table(kernels, launches)))
    names = {kernel.name for kernel in kernels}
    shapes = {part: sum(part in name for name in names) for part in SHAPED}
    count = sum(shapes.values())
    spilling = [kernel for kernel in kernels if kernel.spills > 0]
    idle = f"; {len(names - set(launches))} were never launched" if launches else ""
    each = ", ".join(f"{part} {number}" for part, number in shapes.items())
    print(f"\n{len(names)} kernels, {count} of them compiled shapes ({each}){idle}")
    for kernel in spilling:
        name = readable([kernel.name])[kernel.name]
        print(f"spills: {name} for {kernel.target}, {kernel.spills} bytes", file=sys.stderr)
    serialized = [kernel for kernel in kernels if kernel.serialized]
    for kernel in serialized:
        name = readable([kernel.name])[kernel.name]
        print(f"waits after every wgmma: {name}, due to {kernel.serialized}", file=sys.stderr)
    if count > MAX_SHAPES:
        print(f"{count} compiled shapes; allowed: {MAX_SHAPES}", file=sys.stderr)
    return 1 if spilling or serialized or count > MAX_SHAPES else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
