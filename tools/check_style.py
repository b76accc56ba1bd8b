#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks what clang-format and clang-tidy do not: sizes, dependencies between folders, and habits to keep out.

Usage: check_style.py [ROOT], by default the repository that holds this script. Looks at the files that git tracks and
at new ones that it does not ignore. Prints "path:line: what" for each finding. Exit status: 0 none, 1 some, 2 no git.
"""

import ast
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path, PurePosixPath

MAX_FILE, MAX_FUNCTION, MAX_COLUMNS, MAX_MACRO = 400, 120, 120, 3  # lines, lines, characters, lines
MIN_KERNEL_COMMENT = 5  # lines
CPP = {".h", ".cpp", ".cu", ".cuh"}
TEXT = {".md", ".txt", ".json", ".toml", ".yml", ".yaml", ".cff"}
TEXT_NAMES = {"LICENSE", "NOTICE", ".gitignore", ".gitattributes", ".clang-format", ".clang-tidy"}

# Comments, literals (a digit separator is not a quote), preprocessor lines with their continuations.
TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'|\b\d[\w.']*""", re.S
)
SCOPE = re.compile(r"\s*(template\s*<.*>\s*)?(inline\s+)?(namespace|class|struct|union|enum)\b", re.S)
DIRECTIVE = re.compile(r"^[ ]*#(?:[^\n]*\\\n)*[^\n]*", re.M)


def blank(match):
    """The match with everything but line breaks (and numbers) replaced by blanks."""
    text = match[0]
    return text if text[0].isdigit() else re.sub(r"[^\n]", " ", text)


class File:
    """One file: `name` relative to the root with "/" between folders, `lines`, and `code`."""

    def __init__(self, root, name):
        self.name = name
        self.suffix = PurePosixPath(name).suffix
        self.text = (root / name).read_bytes().decode("utf-8", "replace")
        self.lines = self.text.split("\n")
        self.is_cpp = self.suffix in CPP
        self.is_python = self.suffix == ".py" or re.match(r"#!.*\bpython", self.text) is not None
        is_script = self.suffix == "" and self.text.startswith("#!")
        is_cmake = self.suffix == ".cmake" or PurePosixPath(name).name == "CMakeLists.txt"
        self.is_source = self.is_cpp or self.is_python or is_cmake or is_script or self.suffix == ".sh"
        self.is_text = self.is_source or self.suffix in TEXT or PurePosixPath(name).name in TEXT_NAMES

    def below(self, *folders):
        return self.name.startswith(folders)

    @cached_property
    def code(self):
        """C++ with comments and literals blanked: positions and lines stay what they are."""
        return TOKEN.sub(blank, self.text)

    def find(self, pattern, text=None):
        """(line, match) of each match, in the code unless another text is given."""
        text = self.code if text is None else text
        for match in re.finditer(pattern, text, re.M):
            yield text.count("\n", 0, match.start()) + 1, match


def split_arguments(text, opening, closing, stop):
    """The arguments up to `stop` at depth 0: commas within the brackets `opening` .. `closing` do not split."""
    depth, arguments = 0, [""]
    for i, character in enumerate(text):
        if depth == 0 and text.startswith(stop, i):
            break
        depth += (character in opening) - (character in closing)
        if depth == 0 and character == ",":
            arguments.append("")
        else:
            arguments[-1] += character
    return arguments


def generated_file(file):
    if re.search(r"(^|/)(build([-_.][^/]*)?|CMakeFiles|__pycache__)/|\.(o|so|a|pyc|pyd|obj)$", file.name):
        yield 1, "generated file"


def bool_template_parameter(file):
    for line, match in file.find(r"(?:\btemplate|\])\s*<"):
        for parameter in split_arguments(re.split(r"[;{]", file.code[match.end() :], maxsplit=1)[0], "(<[", ")>]", ">"):
            if re.match(r"\s*(const(expr)?\s+)?bool\b", parameter):
                yield line, "bool template parameter"


def macro(file):
    for line, match in file.find(r"^[ ]*#\s*define\s+(\w+)(\(?)(?:[^\n]*\\\n)*[^\n]*"):
        if re.search("SWITCH|DISPATCH", match[1]):
            yield line, f"dispatch macro {match[1]}"
        if match[2] and match[0].count("\n") >= MAX_MACRO:
            yield line, f"macro {match[1]} of more than {MAX_MACRO} lines"


def file_length(file):
    if len(file.text.splitlines()) > MAX_FILE:
        yield MAX_FILE + 1, f"file of more than {MAX_FILE} lines"


def cpp_function_length(file):
    """Matches braces. What stands before an opening one tells a function from a namespace, a type or a list."""
    code = DIRECTIVE.sub(blank, file.code)
    start, stack = 0, []  # where the current declaration starts; (its start, is it a function) of each open brace
    for match in re.finditer(r"[{};]", code):
        if match[0] == "{":
            head = code[start : match.start()]
            first = start + len(head) - len(head.lstrip())
            stack.append((first, ")" in head and not SCOPE.match(head) and not any(inner for _, inner in stack)))
        elif match[0] == "}" and stack:
            first, is_function = stack.pop()
            length = code.count("\n", first, match.start()) + 1
            if is_function and length > MAX_FUNCTION:
                yield code.count("\n", 0, first) + 1, f"function of {length} lines, more than {MAX_FUNCTION}"
            if re.match(r"\s*[,{()]", code[match.end() :]):  # a braced initializer: the declaration goes on
                start = first
                continue
        start = match.end()


def python_function_length(file):
    try:
        tree = ast.parse(file.text)
    except SyntaxError as error:
        yield error.lineno or 1, f"not Python: {error.msg}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                yield node.lineno, f"function of {length} lines, more than {MAX_FUNCTION}"


TORCH = r"<(torch|ATen|c10|pybind11)/|\"(torch|ATen)/"
CUDA = r"<(cuda|cooperative_groups|cub/|nccl|mma\.h)|\"(cuda(_runtime|_fp16|_bf16)?|cooperative_groups|nccl)\.h\""
# Files (below these folders; not below those) must not include what matches.
INCLUDES = (
    ("", ("python/", "tests/"), TORCH, "PyTorch's headers belong below python/"),
    ("", ("src/cuda/", "tests/"), CUDA, "CUDA's headers belong below src/cuda/"),
    ("src/", (), r"\"(\.\./)*cli/", "src/ must not include cli/"),
    ("src/common/", (), r"\"(\.\./)*((reference|cpu|cuda)/|kernel\.h)", "src/common/ must include no backend"),
    ("src/reference/", (), r"\"(\.\./)*(cpu|cuda)/", "src/reference/ must not include src/cpu/ or src/cuda/"),
    ("src/cpu/", (), r"\"(\.\./)*(reference|cuda)/", "src/cpu/ must not include src/reference/ or src/cuda/"),
    ("src/cuda/", (), r"\"(\.\./)*(reference|cpu)/", "src/cuda/ must not include src/reference/ or src/cpu/"),
    ("src/cuda/plain/", (), r"\"(\.\./)*(cuda/)?sm\d+/", "src/cuda/plain/ must not include another architecture"),
    ("src/cuda/sm80/", (), r"\"(\.\./)*(cuda/)?(plain|sm90)/", "src/cuda/sm80/ must not include another architecture"),
    ("src/cuda/sm90/", (), r"\"(\.\./)*(cuda/)?(plain|sm80)/", "src/cuda/sm90/ must not include another architecture"),
    ("src/cuda/prepare/", (), r"\"(\.\./)*(cuda/)?(plain|sm\d+)/", "src/cuda/prepare/ must include no architecture"),
    ("src/distributed/", (), r"\"(?!distr/|distributed/)", "src/distributed/ must use nothing below include/"),
    ("cli/", (), r"\"(\.\./)*(src/)?(reference|cpu|cuda)/", "cli/ must not include a backend"),
    ("include/distr/", (), r"(?!<[a-z_0-9]+>|\"distr/)", "include/distr/ includes <standard> and \"distr/...\" only"),
)


def include(file):
    for line, match in file.find(r"^[ ]*#\s*include\s*([<\"][^>\"\n]*[>\"])", file.text):
        for below, exempt, forbidden, what in INCLUDES:
            if file.below(below) and not file.below(*exempt) and re.match(forbidden, match[1]):
                yield line, f"{what}: {match[1]}"


def commented_out_code(file):
    statement = r"(return\b|(const\s+)?[\w:<>*&]+(\s+[*&]?\w+)?\s*[-+*/|&]?=\s|[\w:.<>\[\]*&]+(->\w+)?\().*;"
    block = r"((\}\s*)?(if|else|for|while|switch|do)\b.*[(=].*|\S+(\s\S+)?\(.*\)[\w\s]*)\{|.*[(=].*;\s*\}"
    for line, match in file.find(r"^[ ]*//(?!/)[ ]*(.*?)[ ]*$", file.text):
        if re.fullmatch(f"{statement}|{block}", match[1]):
            yield line, "commented-out code"


def licence(file):
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in file.lines[:5]):
        yield 1, "no SPDX-License-Identifier: Apache-2.0 in the first 5 lines"


def include_guard(file):  # Highway includes a header once for each instruction set; such headers have its guard
    if not re.search(r"^#pragma once$|\bHWY_TARGET_TOGGLE\b", file.code, re.M):
        yield 1, "no #pragma once"


def layout(file):
    for number, line in enumerate(file.lines, 1):
        if (file.is_cpp or file.is_python) and "\t" in line:
            yield number, "tab"
        if (file.is_cpp or file.is_python) and len(line) > MAX_COLUMNS:
            yield number, f"more than {MAX_COLUMNS} characters"
        if line != line.rstrip():
            yield number, "blanks at the end of the line"
    if file.text and not file.text.endswith("\n"):
        yield len(file.lines), "no newline at the end of the file"


def library_habit(file):
    calls = r"\b(exit|abort|assert|[fv]?printf)\s*\("
    for line, match in file.find(rf"{calls}|\bstd::(cout|cerr)\b|\bcudaDeviceSynchronize\b"):
        yield line, f"{match[0].rstrip('( ')} in the library"


def unfinished(file):
    for line, match in file.find(r"\b(TO[D]O|FIX[M]E|X[X]X)\b", file.text):
        yield line, f"unfinished: {match[0]}"


def launch_without_stream(file):
    for line, match in file.find("<<<"):
        if len(split_arguments(file.code[match.end() :], "([{", ")]}", ">>>")) < 4:
            yield line, "kernel launch that names no stream"


def kernel_comment(file):
    opening = re.match(r"(//[^\n]*\n)+|(//[^\n]*\n)?/\*.*?\*/\n?", file.text, re.S)
    if re.search(r"\b__global__\b", file.code) and (not opening or opening[0].count("\n") < MIN_KERNEL_COMMENT):
        yield 1, f"a file with kernels opens with a comment of at least {MIN_KERNEL_COMMENT} lines"


RULES = (
    (lambda file: True, (generated_file,)),
    (lambda file: file.is_cpp, (bool_template_parameter, macro, cpp_function_length, include, commented_out_code)),
    (lambda file: file.is_cpp or file.is_python, (file_length,)),
    (lambda file: file.is_python, (python_function_length,)),
    (lambda file: file.is_source, (licence, unfinished)),
    (lambda file: file.suffix in {".h", ".cuh"}, (include_guard,)),
    (lambda file: file.is_text, (layout,)),
    (lambda file: file.is_cpp and file.below("src/", "include/"), (library_habit,)),
    (lambda file: file.is_cpp and file.below("src/cuda/"), (launch_without_stream, kernel_comment)),
)


def check(root):
    """(name, line, what) of every finding, in order."""
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
    files = [File(root, name) for name in sorted(set(names)) if (root / name).is_file()]
    rules = [(file, rule) for file in files for applies, group in RULES if applies(file) for rule in group]
    return sorted({(file.name, line, what) for file, rule in rules for line, what in rule(file)})


def main(arguments):
    root = Path(arguments[0] if arguments else Path(__file__).resolve().parent.parent)
    try:
        findings = check(root)
    except subprocess.CalledProcessError:
        return 2
    for name, line, what in findings:
        print(f"{name}:{line}: {what}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
