#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy on the sources that standard input names, as few translation units as their names allow.

Usage: tidy.py BUILD [JOBS] < NAMES       BUILD holds compile_commands.json. Exit status: 0, or 1 if there are findings.

Most of clang-tidy's time goes to the headers (the standard library, JSON, CLI11), which sources that are written into
one file share (written, not included: clang's analyzer passes over what is included). Sources that declare the same
name for themselves do not go together; those that still cannot be compiled in one file are halved.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The analyzer follows calls until it has seen so many states of a function that it gives the rest of it up, as of 44
# of the command's 276. Where it follows none into the standard library, nor into long functions (of JSON and CLI11,
# for the most part), it gives up fewer: of null pointers that were planted, one a function, it found 55 of 73 in the
# command and 86 of 87 in the library, where it had found 18 and 32 of the same, and took a third of the time. What
# was moved from, which it then misses, bugprone-use-after-move finds.
ANALYZER = ["c++-stdlib-inlining=false", "max-inlinable-size=4"]  # blocks of a function's control flow
# What is declared at the start of a line, among it what unnamed namespaces hold: a type, an alias or a constant by its
# name, a function by its line, since those of other parameters are overloads. And the namespace that follows.
DECLARED = re.compile(r"^(?:struct|class|enum class|using|constexpr [^=({]*?) ?(\w+)\s*[={;]"
                      r"|^((?! |return|namespace|using|constexpr|struct|class)[\w:<>,*& ]+[ *&]\w+\([^{;]*)\{"
                      r"|^namespace ([\w:]+) \{",
                      re.MULTILINE)


def declared(path):
    """{(namespace, name)}"""
    found, namespace = set(), ""
    for name, function, opened in DECLARED.findall(Path(path).read_text()):
        namespace = opened or namespace
        found.add((namespace, name or function))
    return found - {(namespace, "") for namespace, _ in found}


def flags(command):
    """The arguments of a compile command without the compiler, its input, its output and how it optimises."""
    words = shlex.split(command["command"])
    kept, skip = [], True
    for word in words:
        if skip:
            skip = False
        elif word == "-o":
            skip = True
        elif word != "-c" and not (word.endswith(".cpp") and not word.startswith("-")) and word[:2] not in ("-O", "-f"):
            kept.append(word)
    return kept


def macros(words):
    """{name: definition} of -D."""
    return {word[2:].partition("=")[0]: word for word in words if word.startswith("-D")}


def groups(sources, commands):
    """Lists of (source, its flags) that can share a translation unit: of one folder of the repository, or of src and
    tests, whose sources find their headers in the same places, with no macro defined in two ways and no name declared
    twice."""
    made = []  # [folder, flags, names declared, sources]
    for source in sources:
        folder, own, names = Path(source).relative_to(ROOT).parts[0], flags(commands[source]), declared(source)
        folder = "src" if folder == "tests" else folder
        for group in made:
            theirs, ours = macros(group[1]), macros(own)
            if group[0] == folder and not group[2] & names and all(theirs.get(n, ours[n]) == ours[n] for n in ours):
                group[1] = [*dict.fromkeys([*group[1], *own])]
                group[2] |= names
                group[3].append(source)
                break
        else:
            made.append([folder, own, names, [source]])
    return [(own, members) for _, own, _, members in made]


def join(sources, unit):
    """Writes the sources into one file; returns the source and its line of each of the file's lines."""
    origin, text, included = [], "", set()
    for source in sources:
        lines = Path(source).read_text().splitlines()
        origin += [f"{source}:{number}:" for number in range(1, len(lines) + 1)]
        text += "".join(("" if line in included else line) + "\n" for line in lines)
        included |= {line for line in lines if line.startswith("#include")}  # which a later source need not repeat
    unit.write_text(text)
    return origin


def check(sources, own, folder):
    """What clang-tidy prints of some sources, and whether it found nothing."""
    unit = folder / f"together_{Path(sources[0]).stem}_{len(sources)}.cpp"
    origin = join(sources, unit)
    own = [*own, *dict.fromkeys(f"-iquote{Path(source).parent}" for source in sources)]
    own += [word for option in ANALYZER for word in ("-Xclang", "-analyzer-config", "-Xclang", option)]
    result = subprocess.run(["clang-tidy", "--quiet", unit, "--", *own], capture_output=True, text=True, check=False)
    if len(sources) > 1 and "[clang-diagnostic-error]" in result.stdout:
        half = len(sources) // 2
        first, second = check(sources[:half], own, folder), check(sources[half:], own, folder)
        return first[0] + second[0], first[1] and second[1]
    # clang's count of warnings is of headers of others, which are not shown.
    text = result.stdout + re.sub(r"^\d+ warnings? generated\.\n", "", result.stderr, flags=re.MULTILINE)
    text = re.sub(rf"{re.escape(str(unit))}:(\d+):", lambda line: origin[int(line[1]) - 1], text)
    return text, result.returncode == 0


def main(build, jobs):
    commands = {entry["file"]: entry for entry in json.loads((build / "compile_commands.json").read_text())}
    sources = [str(Path(line.strip()).resolve()) for line in sys.stdin]
    for source in sources:  # one of the CUDA backend is compiled as the source that has most of its path
        if source not in commands:
            commands[source] = commands[max(commands, key=lambda other: len(os.path.commonprefix([source, other])))]
    # The largest first: the small ones fill what they leave.
    work = sorted(groups(sources, commands), key=lambda group: -len(group[1]))
    print(f"{len(sources)} sources in {len(work)} translation units", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda group: check(group[1], group[0], build), work))
    for text, _ in results:
        print(text, end="")
    return 0 if all(clean for _, clean in results) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count()))
