# SPDX-License-Identifier: Apache-2.0
"""tools/register_table.py on a report as nvcc writes it, and on a compiler that is none."""

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "register_table.py"
spec = importlib.util.spec_from_file_location("register_table", TOOL)
register_table = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = register_table  # dataclasses look their module up
spec.loader.exec_module(register_table)

NAME = "_ZN5distr4cuda5plain9dv_kernelI6__halfEEvi"
REPORT = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{NAME}' for 'sm_80'
ptxas info    : Function properties for {NAME}
    16 bytes stack frame, SPILLED bytes spill stores, 24 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 38912 bytes smem, 752 bytes cmem[0]
ptxas info    : Compiling entry function '{NAME}' for 'sm_90'
ptxas info    : Function properties for {NAME}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
"""
CLEAN = REPORT.replace("SPILLED", "0").replace("24 bytes spill loads", "0 bytes spill loads")


class RegisterTableTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = Path(folder.name)

    def run_on(self, report, *arguments, suffix=""):
        (self.build / f"kernel{suffix}.o").touch()
        (self.build / f"kernel{suffix}.o.ptxas").write_text(report)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = register_table.main([str(self.build), *arguments])
        return status, output.getvalue(), errors.getvalue()

    def test_parses_every_target(self):
        kernels = register_table.parse(REPORT.replace("SPILLED", "8"))
        self.assertEqual([(k.target, k.registers, k.shared, k.local, k.spills) for k in kernels],
                         [("sm_80", 128, 38912, 16, 32), ("sm_90", 96, 0, 0, 0)])

    def test_prints_a_row_with_the_name_as_in_the_source(self):
        status, output, _ = self.run_on(CLEAN)
        self.assertEqual(status, 0)
        self.assertIn("| kernel | registers sm_80 | registers sm_90 | static shared | local | spilled |", output)
        self.assertIn("| `plain::dv_kernel<f16>` | 128 | 96 | 38912 | 16 | 0 |", output)

    def test_a_spill_fails(self):
        status, _, errors = self.run_on(REPORT.replace("SPILLED", "8"))
        self.assertEqual(status, 1)
        self.assertIn("spills: plain::dv_kernel<f16> for sm_80, 32 bytes", errors)

    def test_serialized_products_fail(self):
        warning = ("ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized "
                   f"due to insufficient register resources for the function '{NAME}'\n")
        status, _, errors = self.run_on(warning + CLEAN)
        self.assertEqual(status, 1)
        self.assertIn("waits after every wgmma: plain::dv_kernel<f16>, due to insufficient register resources", errors)

    def test_kernels_of_a_test_program_are_left_out(self):
        spilling = REPORT.replace("SPILLED", "8")
        ablations = "".join(spilling.replace("I6__half", f"I6__halfNS_4test{name}E")
                            for name in ("8NoValues", "13NoExponential"))
        status, output, _ = self.run_on(CLEAN.replace("I6__half", "I6__halfNS0_6StagesE") + ablations)
        self.assertEqual(status, 0)
        self.assertIn("1 kernels", output)

    def test_too_many_shapes_fail(self):
        parts = ("sm807forward", "sm907forward", "sm908backward", "ShapeI")
        of_all = ["".join(CLEAN.replace("I6__half", f"I{len(part) + 2 + len(str(n))}{part}_x{n}") for n in range(32))
                  for part in parts]
        status, output, _ = self.run_on("".join(of_all))
        self.assertEqual(status, 0)
        self.assertIn("128 kernels, 128 of them compiled shapes (sm807forward 32, sm8012near_forward 0, sm907forward "
                      "32", output)
        status, _, errors = self.run_on(of_all[0].replace("_x", "_y")[: len(of_all[0]) // 32], suffix="_more")
        self.assertEqual(status, 1)
        self.assertIn("129 compiled shapes; allowed: 128", errors)

    def test_launches_add_occupancy(self):
        launch = {"kernel": NAME, "threads": 256, "dynamic_shared_bytes": 4096, "blocks_per_sm": 2}
        path = self.build / "launches.json"
        path.write_text(json.dumps({"gpu": "some", "target": "sm_90", "launches": [launch]}))
        status, output, _ = self.run_on(CLEAN, "--launches", str(path))
        self.assertEqual(status, 0)
        self.assertIn("| 128 | 96 | 38912 | 16 | 0 | 256 | 4096 | 2 | 512 |", output)
        self.assertIn("1 kernels, 0 of them compiled shapes", output)
        self.assertIn("; 0 were never launched", output)

    def test_a_kernel_that_was_never_launched_is_counted(self):
        path = self.build / "launches.json"
        path.write_text(json.dumps({"launches": [{"kernel": "another", "threads": 1, "dynamic_shared_bytes": 0,
                                                  "blocks_per_sm": 1}]}))
        _, output, _ = self.run_on(CLEAN, "--launches", str(path))
        self.assertIn("| 128 | 96 | 38912 | 16 | 0 | - | - | - | - |", output)
        self.assertIn("1 were never launched", output)

    def test_a_folder_without_reports_fails(self):
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            self.assertEqual(register_table.main([str(self.build)]), 2)
        self.assertIn("holds no report of CUDA kernels", errors.getvalue())

    def test_a_report_without_its_object_does_not_count(self):
        (self.build / "gone.o.ptxas").write_text(REPORT.replace("SPILLED", "8"))
        self.assertEqual(self.run_on(CLEAN)[0], 0)

    def test_compiles_and_keeps_the_report(self):
        source = "import sys; print('ptxas info    : Used 1 registers', file=sys.stderr);"
        source += "print('a warning', file=sys.stderr); sys.exit(int('fail' in sys.argv))"
        compiler, target = [sys.executable, "-c", source], self.build / "x.o"
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            self.assertEqual(register_table.main(["--compile", *compiler, "-o", str(target)]), 0)
        self.assertEqual(errors.getvalue(), "a warning\n")
        self.assertIn("Used 1 registers", Path(f"{target}.ptxas").read_text())
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(register_table.main(["--compile", *compiler, "fail"]), 1)


if __name__ == "__main__":
    unittest.main()
