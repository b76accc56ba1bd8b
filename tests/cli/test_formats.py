# SPDX-License-Identifier: Apache-2.0
"""`distr attend`: the kinds of .npy and .safetensors files it reads and writes, and `--dtype`."""

import numpy as np
import oracle
import pytest
import safetensors

EXACT = ("--strategy", "exact")


def tensor(kind, values):
    """One tensor for write_safetensors; kind: bfloat16 or a NumPy type."""
    return kind, oracle.as_bf16(values) if kind == "bfloat16" else np.ascontiguousarray(values, kind)


def write_safetensors(path, **tensors):
    """Writes tensors with the format's own library."""
    path.write_bytes(
        safetensors.serialize(
            {
                name: safetensors.TensorSpec(
                    dtype=kind, shape=data.shape, data_ptr=data.ctypes.data, data_len=data.nbytes
                )
                for name, (kind, data) in tensors.items()
            }
        )
    )
    return path


def read_safetensors(path):
    """name -> (type, values) with the format's own library."""
    result = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        dtype = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "I32": "<i4"}[entry["dtype"]]
        values = np.frombuffer(bytes(entry["data"]), dtype).reshape(entry["shape"])
        result[name] = entry["dtype"], oracle.from_bf16(values) if entry["dtype"] == "BF16" else values
    return result


def npy(array, version=(1, 0), fortran=False, descr=None, spaces=0):
    """The bytes of a .npy file, written by hand."""
    descr = array.dtype.str if descr is None else descr
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {array.shape}, }}" + " " * spaces + "\n"
    length = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header.encode() + array.tobytes("F" if fortran else "C")


@pytest.fixture
def attend_files(run, tmp_path):
    """attend_files(q, k, v, *options) -> O, from the bytes of three .npy files."""

    def attend(q, k, v, *options):
        words = []
        for name, content in (("q", q), ("k", k), ("v", v)):
            (tmp_path / f"{name}.npy").write_bytes(content)
            words += [f"--{name}", tmp_path / f"{name}.npy"]
        result = run("attend", *words, "--out", tmp_path / "o.npy", *EXACT, *options)
        assert result.code == 0, result.stderr
        return np.load(tmp_path / "o.npy")

    return attend


@pytest.mark.parametrize("shape", [(9, 8), (3, 9, 8), (2, 3, 9, 8)], ids=str)
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f2", ">f4", ">f8", "=f4"])
@pytest.mark.parametrize("fortran", [False, True])
def test_memory_orders_and_byte_orders(attend_files, problem, shape, dtype, fortran):
    arrays = problem(shape, dtype=dtype)
    plain = attend_files(*[npy(x.astype(np.dtype(dtype).newbyteorder("<"))) for x in arrays])
    o = attend_files(*[npy(x, fortran=fortran, descr=dtype if dtype[0] != "=" else "=f4") for x in arrays])
    assert o.dtype == np.dtype(dtype).newbyteorder("<")
    np.testing.assert_array_equal(o, plain)
    np.testing.assert_allclose(o, oracle.attention(*arrays)[0], atol=2e-3 if "f2" in dtype else 3e-6)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
@pytest.mark.parametrize("spaces", [0, 1, 5000])
def test_header_versions_and_paddings(attend_files, problem, version, spaces):
    arrays = problem((9, 8))
    o = attend_files(*[npy(x, version, spaces=spaces) for x in arrays])
    np.testing.assert_allclose(o, oracle.attention(*arrays)[0], atol=3e-6)


def test_mixed_layouts_and_byte_orders(attend_files, problem):
    q, k, v = problem((2, 9, 8))
    o = attend_files(npy(q, fortran=True), npy(k.astype(">f4")), npy(v.astype(">f4"), (2, 0), fortran=True))
    np.testing.assert_allclose(o, oracle.attention(q, k, v)[0], atol=3e-6)


def test_fortran_mask_and_big_endian_mask(attend, problem):
    q, k, v = problem((2, 9, 8), (2, 7, 8))
    mask = np.random.default_rng(1).standard_normal((9, 7))
    expected = oracle.attention(q, k, v, mask=mask)[0]
    for variant in (np.asfortranarray(mask), mask.astype(">f8")):
        np.testing.assert_allclose(attend(q, k, v, *EXACT, mask=variant).files["--out"], expected, atol=3e-6)
    keep = np.asfortranarray(mask > 0)
    result = attend(q, k, v, *EXACT, mask=keep)
    np.testing.assert_allclose(result.files["--out"], oracle.attention(q, k, v, mask=keep)[0], atol=3e-6)


def test_fortran_order_tensor(attend, problem, save):
    q, k, v = problem((2, 40, 6))
    setting = oracle.Setting("lsh", 2, 16)
    order = np.random.default_rng(4).permuted(np.tile(np.arange(6), (2, 3, 1)), axis=-1)
    result = attend(q, k, v, *setting.flags(), "--order", save("order", np.asfortranarray(order)))
    np.testing.assert_allclose(result.files["--out"], oracle.attention(q, k, v, setting, order[None])[0], atol=3e-6)


SAFE_TYPES = [("float16", "F16", 2e-3), ("bfloat16", "BF16", 1.6e-2), ("float32", "F32", 3e-6)]


@pytest.mark.parametrize("kind, name, tolerance", SAFE_TYPES)
@pytest.mark.parametrize("mask", [None, "bool", "float32"])
def test_safetensors_in_and_out(run, tmp_path, problem, kind, name, tolerance, mask):
    arrays = problem((4, 30, 12), (2, 25, 12), dv=7)
    tensors = {letter: tensor(kind, x) for letter, x in zip("qkv", arrays)}
    if mask is not None:
        drawn = np.random.default_rng(3).standard_normal((30, 25)).astype("f4")
        drawn = drawn > 0 if mask == "bool" else drawn
        tensors["mask"] = tensor(mask, drawn)
    source = write_safetensors(tmp_path / "x.safetensors", **tensors, other=tensor("float32", np.zeros(3)))
    paths = [tmp_path / f"{part}.safetensors" for part in ("o", "l", "p")]
    words = [word for pair in zip(("--out", "--lse", "--order-out"), paths) for word in pair]
    result = run("attend", "--input", source, *words, *EXACT)
    assert result.code == 0, result.stderr
    round_to = {"float16": lambda x: x.astype("f2"), "bfloat16": lambda x: oracle.from_bf16(oracle.as_bf16(x))}
    rounded = [round_to.get(kind, np.asarray)(x) for x in arrays]
    o, lse = oracle.attention(*rounded, mask=None if mask is None else drawn)
    written = [read_safetensors(path) for path in paths]
    assert [list(entry) for entry in written] == [["o"], ["lse"], ["order"]]
    assert [entry[key][0] for entry, key in zip(written, ("o", "lse", "order"))] == [name, "F32", "I32"]
    np.testing.assert_allclose(written[0]["o"][1], o, rtol=0, atol=tolerance)
    np.testing.assert_allclose(written[1]["lse"][1], lse, rtol=0, atol=max(tolerance, 1e-5))
    assert written[2]["order"][1].shape == (4, 1, 12)


def test_bf16_in_npy_is_written_as_f4(run, tmp_path, problem):
    tensors = {letter: tensor("bfloat16", x) for letter, x in zip("qkv", problem((30, 12)))}
    source = write_safetensors(tmp_path / "x.safetensors", **tensors)
    for suffix in ("npy", "safetensors"):
        result = run("attend", "--input", source, "--out", tmp_path / f"o.{suffix}", *EXACT)
        assert result.code == 0, result.stderr
    o = np.load(tmp_path / "o.npy")
    assert o.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(o, read_safetensors(tmp_path / "o.safetensors")["o"][1])


def test_tensors_from_different_files(run, tmp_path, problem, save):
    q, k, v = problem((30, 12))
    one = write_safetensors(tmp_path / "a.safetensors", q=tensor("float32", q), k=tensor("float32", k))
    result = run("attend", "--q", one, "--k", one, "--v", save("v", v), "--out", tmp_path / "o.npy", *EXACT)
    assert result.code == 0, result.stderr
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), oracle.attention(q, k, v)[0], atol=3e-6)


def test_order_from_and_to_safetensors(run, tmp_path, problem):
    q, k, v = problem((40, 12))
    setting = oracle.Setting("energy", 2, 16)
    tensors = {letter: tensor("float32", x) for letter, x in zip("qkv", (q, k, v))}
    source = write_safetensors(tmp_path / "x.safetensors", **tensors)
    order = np.random.default_rng(4).permuted(np.tile(np.arange(12), (3, 1)), axis=-1)
    for kind in ("int64", "uint8", "int32"):
        given = write_safetensors(tmp_path / "p.safetensors", order=tensor(kind, order))
        words = ("--order", given, "--order-out", tmp_path / "used.safetensors", "--out", tmp_path / "o.npy")
        result = run("attend", "--input", source, *words, *setting.flags())
        assert result.code == 0, result.stderr
        np.testing.assert_array_equal(read_safetensors(tmp_path / "used.safetensors")["order"][1], order)
        o = oracle.attention(q, k, v, setting, order[None, None])[0]
        np.testing.assert_allclose(np.load(tmp_path / "o.npy"), o, atol=3e-6)


ROUND = {
    "f16": lambda x: x.astype("f2"),
    "bf16": lambda x: oracle.from_bf16(oracle.as_bf16(x)),
    "f32": lambda x: x.astype("f4"),
    "f64": lambda x: x,
}


@pytest.mark.parametrize("source", ["f2", "f4", "f8"])
@pytest.mark.parametrize("dtype, tolerance", [("f16", 2e-3), ("bf16", 1.6e-2), ("f32", 3e-6), ("f64", 1e-13)])
def test_dtype_rounds_inputs_and_output(attend, problem, source, dtype, tolerance):
    q, k, v = problem((2, 30, 12), dtype=source)
    result = attend(q, k, v, *EXACT, "--dtype", dtype)
    o = result.files["--out"]
    assert o.dtype == np.dtype(f"<{source}") and result.files["--lse"].dtype == np.dtype("<f4")
    widths = {"f2": 2e-3, "f4": 1e-6, "f8": 0}
    expected = oracle.attention(*[np.asarray(ROUND[dtype](x), "f8") for x in (q, k, v)])[0]
    np.testing.assert_allclose(o, expected, rtol=0, atol=tolerance + widths[source])
    if source != "f2":
        np.testing.assert_array_equal(o, np.asarray(ROUND[dtype](o), o.dtype))


def test_f64_is_computed_by_the_reference(attend, problem):
    q, k, v = problem((2, 30, 12), dtype="f8")
    assert "reference/forward" in attend(q, k, v, *EXACT).stdout
    assert "reference/forward" not in attend(*[x.astype("f4") for x in (q, k, v)], *EXACT).stdout
    assert "reference/forward" in attend(*[x.astype("f4") for x in (q, k, v)], *EXACT, "--dtype", "f64").stdout


def test_infinities_and_nans_pass_through_as_in_exact_attention(attend, problem):
    for dtype in ("f4", "f8"):
        q, k, v = problem((6, 8), dtype=dtype)
        q[2, 3] = np.nan
        v[4, 1] = np.inf
        o = attend(q, k, v, *EXACT).files["--out"]
        assert np.all(np.isnan(o[2]))
        assert np.all(np.isposinf(np.delete(o, 2, axis=0)[:, 1]))
        assert np.all(np.isfinite(np.delete(np.delete(o, 2, axis=0), 1, axis=1)))
