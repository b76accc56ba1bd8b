#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of tools/check_style.py: small repositories in temporary folders, good ones and one bad one for each rule."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_style.py"
SPDX = "SPDX-License-Identifier: Apache-2.0"
CPP = f"// {SPDX}\n"  # line 1 of a C++ file
HEADER = f"{CPP}#pragma once\n"  # lines 1 and 2 of a header
PYTHON = f"# {SPDX}\n"
KERNEL = CPP + "// What it computes.\n// How.\n// Which memory.\n// How fast.\n"  # lines 1 to 5

GOOD = {
    "LICENSE": "Text.\n",
    "README.md": "# Title\n",
    "CMakeLists.txt": f"# {SPDX}\n",
    "tools/run": f"#!/bin/sh\n# {SPDX}\necho TO" + "DOWN\n",
    "data/raw.bin": "\t \0no newline",
    "include/distr/x.h": HEADER + '#include <array>\n\n#include "distr/y.h"\n\nbool f();\n',
    "src/common/block.h": HEADER + '#include "common/grouping.h"\n#include "distr/x.h"\n',
    "src/dispatch.cpp": CPP + '#include "cuda/launch.h"\n#include "common/block.h"\n',
    "src/cpu/simd-inl.h": CPP + "#if defined(A) == defined(HWY_TARGET_TOGGLE)\n#endif\n",
    "src/cpu/a.cpp": CPP
    + '#define HWY_TARGET_INCLUDE "cpu/a.cpp"\n'
    + "#define SHORT(x) \\\n  f(x, \\\n    1)\n"
    + "template <class F, class R = std::function<bool(int)>, int kSize = (3 > 2)>\n"
    + "// Prose, with f(x) = 3 in it; and more (see above);\n"
    + "// the set {0, 1} = {x}\n"
    + "/// auto y = f(x);\n"
    + "static_assert(true);\n"
    + "const char* text = \"abort( exit( template <bool B>\";  // std::cout, printf(\"\");\n"
    + "int n = std::snprintf(text, 1'000, \"{\"), c = '{';\n",
    "src/cuda/sm90/a.h": HEADER + '#include "cuda/prepare/a.h"\n#include "cuda/sm90/b.h"\n',
    "src/cuda/a.cu": KERNEL
    + "#include <cuda_runtime.h>\n\n__global__ void kernel() {}\n"
    + "void f() { kernel<1, 2><<<dim3(1, 2, 3), 32, 0, stream>>>(a); }\n",
    "cli/main.cpp": CPP + '#include <iostream>\n#include "tensor.h"\nvoid f() { std::cout << 1; }\n',
    "tests/a.cpp": CPP + '#include <cuda_runtime.h>\n#include "reference/equations.h"\n',
    "python/a.cpp": CPP + "#include <torch/extension.h>\n",
    "python/a.py": PYTHON + "def f():\n    return 1\n",
}


def lines(count, text="  f();"):
    return "\n".join([text] * count) + "\n"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run(root):
    return subprocess.run([sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False)


class CheckStyle(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.git("init", "-q")

    def git(self, *arguments):
        subprocess.run(["git", "-C", str(self.root), *arguments], check=True)

    def check(self, files):
        """(exit status, lines) of the script for a repository that holds `files`."""
        write(self.root, files)
        done = run(self.root)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout.splitlines()

    def assert_found(self, name, text, *findings):
        """Each finding is "line: start of what"."""
        status, found = self.check({name: text})
        self.assertEqual(status, 1)
        self.assertEqual(len(found), len(findings), found)
        for line, finding in zip(found, findings):
            self.assertTrue(line.startswith(f"{name}:{finding}"), found)

    def assert_clean(self, files):
        self.assertEqual(self.check(files), (0, []))

    def test_good_tree(self):
        self.assert_clean(GOOD)

    def test_tracked_and_new_files_but_not_ignored_or_deleted_ones(self):
        write(self.root, {"tracked.h": "int a;\n", "gone.h": "int b;\n"})
        self.git("add", ".")
        (self.root / "gone.h").unlink()
        status, found = self.check({".gitignore": "/build/\n", "build/x.h": "int c;\n", "new file.h": CPP})
        self.assertEqual(status, 1)
        self.assertEqual({line.split(":")[0] for line in found}, {"tracked.h", "new file.h"})

    def test_no_repository(self):
        self.assertEqual(run("/nonexistent").returncode, 2)

    def test_bool_template_parameter(self):
        text = "\ntemplate <class T,\n          bool kCausal>\nvoid f();\n"
        self.assert_found("a.cpp", CPP + text, "3: bool template")

    def test_bool_template_parameter_pack(self):
        self.assert_found("a.cpp", CPP + "template <std::array<int, 2> a, const bool... kB>\nvoid f();\n", "2: bool")

    def test_bool_template_parameter_of_a_lambda(self):
        self.assert_found("a.cpp", CPP + "auto f = []<bool kB>() {};\n", "2: bool template")

    def test_dispatch_macro(self):
        self.assert_found("a.cpp", CPP + "#define BOOL_SWITCH 1\n", "2: dispatch macro BOOL_SWITCH")
        self.assert_found("a.cpp", CPP + "#  define DISPATCH_D(x) x\n", "2: dispatch macro DISPATCH_D")

    def test_long_macro(self):
        self.assert_found("a.cpp", CPP + "\n#define F(x) \\\n  a \\\n  b \\\n  c\n", "3: macro F of more than 3")

    def test_generated_file(self):
        self.assert_found("build-x/a.txt", "\n", "1: generated")
        self.git("add", ".")
        self.git("rm", "-rqf", ".")
        self.assert_found("a.so", "\n", "1: generated")

    def test_long_file(self):
        self.assert_clean({"a.cpp": CPP + lines(399, "int a;")})
        self.assert_found("a.cpp", CPP + lines(400, "int a;"), "401: file of more than 400")
        self.assert_found("a.cpp", CPP + "\n" * 500, "401: file of more than 400")

    def test_long_python_file(self):
        self.assert_found("a.py", PYTHON + lines(400, "a = 1"), "401: file of more than 400")

    def test_long_cpp_function(self):
        self.assert_clean({"a.cpp": CPP + "void g() {\n" + lines(118) + "}\n"})
        self.assert_found("a.cpp", CPP + "\nvoid g() {\n" + lines(119) + "}\n", "3: function of 121 lines")

    def test_long_method_in_scopes(self):
        head = 'namespace n {\nextern "C" {\nclass C {\n  C(int x = {}, T y = {1}) noexcept\n      : a_{1}, b_{2} {\n'
        tail = "#define OPEN {\n    const auto f = [] {\n      g('}');  // }\n    };\n  }\n};\n}\n}\n"
        self.assert_clean({"a.cpp": CPP + lines(100, "int a;") + head + lines(113) + tail})
        self.assert_found("a.cpp", CPP + head + lines(114) + tail, "5: function of 121 lines")

    def test_long_scopes_are_no_functions(self):
        body = lines(130, "  int a;")
        self.assert_clean({"a.cpp": CPP + "namespace n {\nstruct S : B<decltype(f())> {\n" + body + "};\n}\n"})
        self.assert_clean({"a.cpp": CPP + "template <class T>\nclass alignas(8) S {\n" + body + "};\n"})
        self.assert_clean({"a.cpp": CPP + "constexpr int kTable[] = {\n" + lines(130, "  1,") + "};\n"})

    def test_long_python_function(self):
        self.assert_clean({"a.py": PYTHON + "def g():\n" + lines(119, "    f()")})
        self.assert_found("a.py", PYTHON + "async def g():\n" + lines(120, "    f()"), "2: function of 121 lines")
        self.assert_found("a.py", PYTHON + "def\n", "2: not Python")

    def test_includes(self):
        bad = {
            "src/a.cpp": "<torch/torch.h>",
            "cli/a.cpp": "<ATen/ATen.h>",
            "src/common/a.cpp": "<cuda_runtime.h>",
            "python/a.cpp": "<cuda_fp16.h>",
            "src/cpu/a.cpp": "<cooperative_groups.h>",
            "src/reference/a.cpp": '"cpu/a.h"',
            "src/reference/b.cpp": '"../cuda/a.h"',
            "src/reference/c.cpp": '"cli/a.h"',
            "src/cpu/b.cpp": '"cuda/a.h"',
            "src/cpu/c.cpp": '"reference/a.h"',
            "src/cuda/a.cpp": '"cpu/a.h"',
            "src/cuda/b.cpp": '"reference/a.h"',
            "src/cuda/plain/a.cu": '"cuda/sm80/a.h"',
            "src/cuda/prepare/a.h": '"cuda/sm90/a.h"',
            "src/cuda/prepare/b.h": '"../plain/a.h"',
            "src/cuda/sm80/a.h": '"cuda/plain/a.h"',
            "src/cuda/sm80/b.h": '"cuda/sm90/a.h"',
            "src/cuda/sm90/a.h": '"../sm80/a.h"',
            "src/cuda/sm90/b.h": '"cuda/plain/a.h"',
            "src/common/b.cpp": '"cpu/a.h"',
            "src/common/c.h": '"kernel.h"',
            "src/cuda/c.cpp": '"../../cli/a.h"',
            "cli/b.cpp": '"reference/a.h"',
            "cli/c.cpp": '"../src/cpu/a.h"',
            "include/distr/a.h": '"common/half.h"',
            "include/distr/b.h": "<hwy/highway.h>",
        }
        status, found = self.check({name: HEADER + f"\n#include {what}\n" for name, what in bad.items()})
        self.assertEqual(status, 1)
        self.assertEqual([line.split(": ")[0] for line in found], [f"{name}:4" for name in sorted(bad)])

    def test_commented_out_code(self):
        for code in (
            "f(x, y);",
            "const int x = 3;",
            "x += 3;",
            "std::vector<int>& y = z;",
            "p->f();",
            "return f(x);",
            "if (x) {",
            "} else if (x == 3) {",
            "for (int i = 0; i < 3; ++i) {",
            "void g(int x) const {",
            "if (x) { y = 3; }",
        ):
            with self.subTest(code):
                self.assert_found("a.cpp", f"{CPP}\n  // {code}\n", "3: commented-out code")

    def test_licence(self):
        for name in ("a.cpp", "a.cu", "a.py", "a.cmake", "a.sh", "sub/CMakeLists.txt"):
            with self.subTest(name):
                self.assert_found(name, "\n" * 5 + PYTHON, "1: no SPDX")
                (self.root / name).unlink()
        self.assert_found("script", "#!/bin/sh\n", "1: no SPDX")

    def test_pragma_once(self):
        self.assert_found("a.h", CPP + "// #pragma once\n", "1: no #pragma once")

    def test_layout(self):
        self.assert_found("a.cpp", CPP + "\tint a;\n", "2: tab")
        self.assert_found("a.cpp", CPP + "int a; \n", "2: blanks")
        self.assert_found("a.cpp", CPP + "int a;\r\n", "2: blanks")
        self.assert_found("a.cpp", CPP + "int a" + " " * 115 + ";\n", "2: more than 120")
        self.assert_found("a.cpp", CPP + "int a;", "2: no newline")
        self.assert_clean({"a.cpp": CPP + "int a" + " " * 114 + ";\n"})
        self.assert_found("a.md", "Text  \n", "1: blanks")

    def test_library_habits(self):
        for code in (
            "std::exit(1);",
            "abort();",
            "assert(x);",
            "printf (s);",
            "std::fprintf(stderr, s);",
            "std::cout << 1;",
            "std::cerr << 1;",
            "cudaDeviceSynchronize();",
        ):
            with self.subTest(code):
                self.assert_found("src/a.cpp", f"{CPP}void f() {{\n  {code}\n}}\n", "3: ")
        self.assert_clean({"src/a.cpp": CPP, "cli/a.cpp": CPP + "void f() { std::exit(1); }\n"})

    def test_unfinished(self):
        for word in ("TO" + "DO", "FIX" + "ME", "X" + "XX"):
            with self.subTest(word):
                self.assert_found("a.sh", f"{PYTHON}# {word}: more\n", "2: unfinished")

    def test_launch_without_stream(self):
        self.assert_found("src/cuda/a.cu", CPP + "\nvoid f() { k<<<dim3(1, 2), 3, 0>>>(x, y); }\n", "3: kernel launch")

    def test_kernel_without_comment(self):
        self.assert_found("src/cuda/a.cu", CPP + "__global__ void k() {}\n", "1: a file with kernels")


if __name__ == "__main__":
    unittest.main()
