# SPDX-License-Identifier: Apache-2.0
"""The package as such: importing it never fails, its first use says what is missing, `doctor` tells what there is."""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import distrattention
from distrattention import ops
from distrattention.__main__ import main
from distrattention.settings import Fields, Settings

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
        assert name in ("Settings", "UnavailableError", "__version__"), name
assert len(said) == 1, said  # every name says the same
print(*said)
from distrattention import doctor
lines, ok = doctor.report()
print(lines[-1])
from distrattention.__main__ import main
raise SystemExit(main(["doctor"]))
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


@pytest.mark.parametrize("arguments", [[], ["nurse"], ["doctor", "who"]])
def test_the_command_takes_no_other_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "usage: distrattention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--help"], "doctor"), (["doctor", "--help"], "what would run"), (["--version"], distrattention.__version__)],
)
def test_the_command_explains_itself(arguments, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0 and text in " ".join(capsys.readouterr().out.split())


def test_dir_lists_the_public_names():
    assert dir(distrattention) == sorted(distrattention.__all__)
    assert {"Settings", "__version__", "report", "replace_sdpa"} < set(dir(distrattention))


def test_type_checkers_are_told():
    """The marker is installed, they see every public name, and no part of a public function is without a type."""
    assert (INSTALLED / "py.typed").is_file()
    tree = ast.parse((INSTALLED / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module.split(".")[1] for node in block.body for alias in node.names}
    assert seen == distrattention._HOMES
    assert Fields.__annotations__ == {field.name: field.type for field in dataclasses.fields(Settings)}
    public = [getattr(distrattention, name) for name in distrattention.__all__ if name != "__version__"]
    for module in ("diffusers", "timm", "transformers"):
        pytest.importorskip(module)
        module = importlib.import_module(f"distrattention.integrations.{module}")
        own = (item for item in vars(module).values() if getattr(item, "__module__", "") == module.__name__)
        public += [item for item in own if not item.__name__.startswith("_")]
    checked = set()
    for item in public:
        functions = vars(item).values() if inspect.isclass(item) else [item]
        for function in functions:
            mine = inspect.isfunction(function) and function.__module__.startswith("distrattention")
            if not mine or (function.__name__.startswith("_") and function.__name__ != "__init__"):
                continue
            checked.add(function.__qualname__)
            signature = inspect.signature(function)
            parts = {name: part.annotation for name, part in signature.parameters.items() if name != "self"}
            parts["return"] = signature.return_annotation
            assert [name for name, kind in parts.items() if kind is inspect.Parameter.empty] == [], function
            assert typing.get_type_hints(function).keys() == parts.keys()
    assert {"scaled_dot_product_attention", "report", "register", "replace_sdpa.__init__", "Report.plot"} < checked


def test_one_version():
    """The package, the library and the headers agree."""
    header = (ROOT / "include" / "distr" / "version.h").read_text()
    numbers = [re.search(rf"VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")]
    assert ops.describe().version == distrattention.__version__ == ".".join(numbers)
    try:
        assert importlib.metadata.version("distrattention") == ".".join(numbers)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path, but not installed")


def test_the_metadata_say_whom_the_package_is_for():
    try:
        found = importlib.metadata.metadata("distrattention")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path, but not installed")
    assert {"Typing :: Typed", "Programming Language :: Python :: 3"} < set(found.get_all("Classifier"))
    assert any(url.startswith("Paper, ") for url in found.get_all("Project-URL"))


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
