# SPDX-License-Identifier: Apache-2.0
"""The package as such: importing it never fails, its first use says what is missing, `doctor` tells what there is."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distrattention
from distrattention import doctor, ops

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(ops.__file__).parent

USE = """
import distrattention
print("imported")
said = set()
for name in distrattention.__all__:
    try:
        getattr(distrattention, name)
    except distrattention.UnavailableError as error:
        said.add(str(error))
    else:
        assert name in ("Settings", "UnavailableError"), name
assert len(said) == 1, said  # every name says the same
print(*said)
from distrattention import doctor
lines, ok = doctor.report()
print(lines[-1])
raise SystemExit(doctor.main(["doctor"]))
"""


def run(code, path=None):
    """Runs code with the package of `path`, whatever is installed: -S, or an editable one would come first."""
    environment = {"PYTHONPATH": f"{path or INSTALLED.parent}:{Path(torch.__file__).parents[1]}", "PATH": ""}
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment)


def says(result, message):
    """The package was imported; its first use and doctor say the same, and doctor's status is 1."""
    lines = result.stdout.splitlines()
    assert lines[0] == "imported" and result.returncode == 1, result.stderr
    assert re.search(message, lines[1]) and re.search(message, lines[2])


def test_without_torch():
    says(run("import sys; sys.modules['torch'] = None\n" + USE), "torch cannot be imported .*; install torch 2.10")


def test_with_a_torch_that_does_not_load():
    broken = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise OSError("libtorch_cpu.so: cannot open shared object file")

sys.meta_path.insert(0, Finder())
"""
    says(run(broken + USE), r"torch cannot be imported \(libtorch_cpu.so: cannot open .*; install torch 2.10")


def test_with_an_old_torch():
    old = "import sys, types; sys.modules['torch'] = old = types.ModuleType('torch'); old.__version__ = '2.9.1+cpu'\n"
    says(run(old + USE), r"torch is 2.9.1\+cpu; allowed: 2.10 and later")


@pytest.fixture
def copied(tmp_path):
    """A copy of the installed package without its library."""
    shutil.copytree(INSTALLED, tmp_path / "distrattention", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    return tmp_path


def test_without_the_library(copied):
    says(run(USE, copied), "no libdistrattention_ops in .*distrattention; install the package")


def test_with_a_library_that_does_not_load(copied):
    (copied / "distrattention" / "libdistrattention_ops.so").write_bytes(b"not a library")
    says(run(USE, copied), r"torch \S+ could not load libdistrattention_ops.so: ")


def test_importing_loads_no_torch():
    """`import distrattention` is light; torch comes with the first use."""
    code = "import sys, distrattention; assert 'torch' not in sys.modules; distrattention.Settings(group_size=4)"
    result = run(code + "; assert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_there():
    for name in distrattention.__all__:
        assert getattr(distrattention, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attention_is_all_you_need'"):
        distrattention.attention_is_all_you_need


def test_doctor():
    result = subprocess.run([sys.executable, "-m", "distrattention", "doctor"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for wanted in (
        f"torch: {importlib.metadata.version('torch')}",
        f"operators: loaded in torch {torch.__version__}",
        "instruction set: ",
        "kernel: forward cpu/forward",
        f"threads: {torch.get_num_threads()}, torch's own",
        "CUDA devices that torch sees: ",
        "  forward, auto: cpu/forward (energy, which pays from",
        "  backward kernel reference/backward: would serve",
    ):
        assert wanted in result.stdout


def test_doctor_takes_no_other_arguments(capsys):
    assert doctor.main(["nurse"]) == 2 and doctor.main([]) == 2
    assert "usage: python -m distrattention doctor" in capsys.readouterr().err


def test_one_version():
    """The package, the library and the headers agree."""
    header = (ROOT / "include" / "distr" / "version.h").read_text()
    numbers = [re.search(rf"VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")]
    assert ops.describe().version == ".".join(numbers)
    try:
        assert importlib.metadata.version("distrattention") == ".".join(numbers)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path, but not installed")


def test_the_wheel_knows_no_python_version():
    try:
        wheel = importlib.metadata.distribution("distrattention").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path, but not installed")
    assert re.search(r"^Root-Is-Purelib: false$", wheel, re.M) and re.search(r"^Tag: py3-none-\w+$", wheel, re.M)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_library_asks_for_nothing_but_libtorch_cpu():
    """No Python, no certain torch (only its C interface), no second OpenMP; and no symbol of ours is visible."""
    library = ops._find_library()
    dynamic = subprocess.run(["readelf", "-dW", library], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    assert "libtorch_cpu.so" in needed and needed - system <= {"libtorch_cpu.so", "libhwy.so.1"}
    assert "libhwy.so.1" not in needed or (library.parent / "libhwy.so.1").is_file()
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", library], check=True, capture_output=True, text=True
    ).stdout
    rows = [row.split() for row in symbols.splitlines() if re.match(r"\s*\d+:", row)]
    undefined = {row[7].split("@")[0] for row in rows if len(row) > 7 and row[6] == "UND"}
    assert not [row for row in rows if len(row) > 7 and row[6] != "UND"]
    foreign = {name for name in undefined if re.match(r"_?(aoti_)?torch|_ZN?K?(2at|3c10|5torch)|_?Py", name)}
    assert foreign and all(re.match(r"(aoti_)?torch_", name) for name in foreign)


def test_the_build_never_imports_torch():
    """Metadata and the search for headers read files only."""
    pytest.importorskip("scikit_build_core")
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'python'); import build_backend;"
        "print(build_backend.torch_include());"
        "print(build_backend.get_requires_for_build_wheel());"
        "build_backend.torch_include = lambda: None;"
        "print(build_backend.get_requires_for_build_wheel())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    include, requires, without_torch = result.stdout.splitlines()[-3:]
    assert Path(include).samefile(Path(torch.__file__).parent / "include")
    assert "torch" not in requires and "torch>=2.10" in without_torch


def test_the_evaluation_has_its_old_name_still():
    code = """if True:
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import distrattention.gauge
        assert [w.category for w in caught if "evaluation" in str(w.message)] == [DeprecationWarning]
        from distrattention import evaluation
        assert all(getattr(distrattention.gauge, name) is getattr(evaluation, name) for name in evaluation.__all__)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
