# SPDX-License-Identifier: Apache-2.0
"""Calls of `distr attend` that must be refused. Each: name, changes to a good call, and words of the message.

A change is an option with its value: None drops the option, an array or bytes become the content of a file that the
option then names, a list is the option given several times, anything else is given as it is. The option "" is left
out of the call, its value is not. "{in}" stands for the
folder of the inputs, "{out}" for that of the outputs.
"""

import json

import numpy as np
from strategies import STRATEGIES

GENERATOR = np.random.default_rng(1)


def draw(*shape, dtype="f4"):
    """A random tensor."""
    return GENERATOR.standard_normal(shape).astype(dtype)


def npy(descr="<f4", shape="(2, 10, 8)", data=b"\0" * 640, version=(1, 0), header=None, length=None, order="False"):
    """The bytes of a .npy file."""
    if header is None:
        header = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n"
    header = header if isinstance(header, bytes) else header.encode()
    length = len(header) if length is None else length
    return b"\x93NUMPY" + bytes(version) + length.to_bytes(2 if version[0] == 1 else 4, "little") + header + data


def safetensors(header=None, data=b"\0" * 1920, length=None, **entries):
    """The bytes of a .safetensors file; a tensor that is not given is a good one."""
    if header is None:
        tensors = {
            name: {"dtype": "F32", "shape": [2, 10, 8], "data_offsets": [640 * i, 640 * i + 640]}
            for i, name in enumerate("qkv")
        }
        for name, change in entries.items():
            tensors[name] = tensors.get(name, {}) | change if isinstance(change, dict) else change
        header = json.dumps({name: entry for name, entry in tensors.items() if entry is not None})
    header = header if isinstance(header, bytes) else header.encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def from_safetensors(content):
    """The changes that give the inputs in one .safetensors file."""
    return {"--q": None, "--k": None, "--v": None, "--input": content}


def order(*changes, shape=(2, 1, 8), dtype="i4"):
    """An order with the identity in each row, but for (index, value)."""
    result = np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
    for index, value in changes:
        result[index] = value
    return result


OTHER = {"dtype": "F32", "shape": [2, 10, 8], "data_offsets": [0, 640]}
HUGE = "(9223372036854775807, 9223372036854775807)"
EXACT = {"--strategy": "exact"}
ORDER = {"--strategy": "lsh", "--group-size": 2}

FILES = [
    ("q missing", {"--q": "{in}/none.npy"}, ["none.npy", "No such file"]),
    ("q in a missing folder", {"--q": "{in}/none/q.npy"}, ["none/q.npy", "No such file"]),
    ("q a folder", {"--q": "{in}"}, ["{in}", "folder", "regular file"]),
    ("q a device", {"--q": "/dev/zero"}, ["/dev/zero", "regular file"]),
    ("q in a file", {"--q": "/dev/null/q.npy"}, ["/dev/null/q.npy", "Not a directory"]),
    ("q empty", {"--q": b""}, ["q.npy", "empty", ".npy file"]),
    ("q one byte", {"--q": b"\x93"}, ["q.npy", ".npy file"]),
    ("q no magic", {"--q": b"hello, world, this is text"}, ["q.npy", "hello", ".npy file"]),
    ("q a zip", {"--q": b"PK\x03\x04" + b"\0" * 100}, ["q.npy", "PK", ".npy file"]),
    ("q only magic", {"--q": b"\x93NUMPY"}, ["q.npy", "6 bytes"]),
    ("q without header", {"--q": b"\x93NUMPY\x01\0"}, ["q.npy", "8 bytes"]),
    ("q half a header", {"--q": npy()[:40]}, ["q.npy", "header", "cut short"]),
    ("q half its data", {"--q": npy()[:-320]}, ["q.npy", "320 bytes", "640"]),
    ("q one byte short", {"--q": npy()[:-1]}, ["q.npy", "639 bytes", "640"]),
    ("q one byte more", {"--q": npy() + b"\0"}, ["q.npy", "641 bytes", "640"]),
    ("k half its data", {"--k": npy()[:-320]}, ["k.npy", "320 bytes", "640"]),
    ("v empty", {"--v": b""}, ["v.npy", "empty"]),
    ("mask empty", {"--mask": b""}, ["mask.npy", "empty"]),
    ("order empty", {**ORDER, "--order": b""}, ["order.npy", "empty"]),
    ("version 0", {"--q": npy(version=(0, 0))}, ["version 0.0", "1.0, 2.0 or 3.0"]),
    ("version 4", {"--q": npy(version=(4, 0))}, ["version 4.0", "1.0, 2.0 or 3.0"]),
    ("oversized header v1", {"--q": npy(length=65535)}, ["65535 bytes", "cut short"]),
    ("oversized header v2", {"--q": npy(version=(2, 0), length=2**32 - 1)}, ["4294967295 bytes", "at most"]),
    ("header of 2 MiB", {"--q": npy(version=(2, 0), header=b" " * 2**21)}, ["2097152 bytes", "at most"]),
    ("header no dict", {"--q": npy(header="[1, 2]\n")}, ["header", "[1, 2]", "allowed"]),
    ("header empty", {"--q": npy(header="")}, ["header", "allowed"]),
    ("header binary", {"--q": npy(header=bytes(range(64)))}, ["header", "allowed"]),
    ("header unclosed", {"--q": npy(header="{'descr': '<f4', 'fortran_order': False, ")}, ["header", "allowed"]),
    ("header lacks shape", {"--q": npy(header="{'descr': '<f4', 'fortran_order': False}")}, ["'shape'", "allowed"]),
    ("header key twice", {"--q": npy(header="{'descr': '<f4', 'descr': '<f4'}")}, ["'descr' twice", "allowed"]),
    ("header unknown key", {"--q": npy(header="{'evil': 1}")}, ["'evil'", "allowed"]),
    ("header runs code", {"--q": npy(header="{'descr': __import__('os')}")}, ["header", "allowed"]),
    ("fortran_order 1", {"--q": npy(order="1")}, ["fortran_order", "'1'", "True and False"]),
    ("shape negative", {"--q": npy(shape="(2, -10, 8)")}, ["'-10'", "allowed"]),
    ("shape of words", {"--q": npy(shape="(2, ten, 8)")}, ["'ten'", "allowed"]),
    ("shape of floats", {"--q": npy(shape="(2, 10.0, 8)")}, ["'10.0'", "allowed"]),
    ("shape a list", {"--q": npy(shape="[2, 10, 8]")}, ["header", "allowed"]),
    ("shape beyond int64", {"--q": npy(shape="(2, 99999999999999999999, 8)")}, ["'99999999999999999999'", "allowed"]),
    ("shape overflows", {"--q": npy(shape=HUGE)}, [HUGE, "too large", "at most"]),
    ("shape overflows to 0", {"--q": npy(shape="(4294967296, 4294967296)", data=b"")}, ["4294967296", "too large"]),
    ("shape beyond the data", {"--q": npy(shape="(1099511627776, 8)")}, ["(1099511627776, 8)", "640 bytes"]),
    ("rank 9", {"--q": npy(shape="(1, 1, 1, 1, 1, 1, 2, 10, 8)")}, ["more than 8 dimensions", "allowed"]),
    ("dtype structured", {"--q": npy(header="{'descr': [('x', '<f4')]}")}, ["structured", "('x'", "allowed"]),
    ("dtype object", {"--q": npy("|O")}, ["'|O'", "allowed"]),
    ("dtype complex", {"--q": npy("<c8")}, ["'<c8'", "allowed"]),
    ("dtype longdouble", {"--q": npy("<f16")}, ["'<f16'", "allowed"]),
    ("dtype date", {"--q": npy("<M8[s]")}, ["'<M8[s]'", "allowed"]),
    ("dtype text", {"--q": npy("<U4")}, ["'<U4'", "allowed"]),
    ("control characters in a header", {"--q": npy("<f\n\x1b[31m")}, ["\\x0a\\x1b", "allowed"]),
]

SAFETENSORS = [
    ("input missing", from_safetensors("{in}/none.safetensors"), ["none.safetensors", "No such file"]),
    ("input empty", from_safetensors(b""), ["empty", "needed"]),
    ("input short", from_safetensors(b"\1\0\0"), ["3 bytes", "needed"]),
    ("input header too long", from_safetensors(safetensors(length=2**63)), ["9223372036854775808", "allowed"]),
    ("input truncated", from_safetensors(safetensors()[:100]), ["header", "cut short"]),
    ("input lacks data", from_safetensors(safetensors()[:-1]), ["data_offsets", "1919", "needed"]),
    ("input has more data", from_safetensors(safetensors() + b"\0"), ["1 bytes after"]),
    ("input no JSON", from_safetensors(safetensors("{oops")), ["JSON", "needed"]),
    ("input a list", from_safetensors(safetensors("[]")), ["'[]'", "needed"]),
    ("input without q", from_safetensors(safetensors(q=None, other=OTHER)), ["'q'", "it has: 'k', 'other', 'v'"]),
    ("input type I4", from_safetensors(safetensors(q={"dtype": "I4"})), ["'I4'", "allowed"]),
    ("input type F8", from_safetensors(safetensors(q={"dtype": "F8_E4M3"})), ["'F8_E4M3'", "allowed"]),
    ("input of integers", from_safetensors(safetensors(q={"dtype": "I32"})), ["i32", "allowed: f16, bf16"]),
    ("input negative shape", from_safetensors(safetensors(q={"shape": [-2, 10, 8]})), ["'-2'", "allowed"]),
    ("input shape too large", from_safetensors(safetensors(q={"shape": [2**62, 2**62]})), [str(2**62), "allowed"]),
    ("input shape mismatch", from_safetensors(safetensors(q={"shape": [2, 10, 9]})), ["640 bytes", "720"]),
    ("input overlaps", from_safetensors(safetensors(k={"data_offsets": [0, 640]})), ["'q'", "byte 0", "overlaps"]),
    ("input offsets reversed", from_safetensors(safetensors(k={"data_offsets": [640, 0]})), ["[640,0]", "needed"]),
    ("input no offsets", from_safetensors(safetensors(k=7)), ["'k'", "needed"]),
    ("input and q", {"--input": safetensors()}, ["--input", "--q", "allowed"]),
    ("input is npy", from_safetensors(npy()), ["header", "allowed"]),
    ("input none", {"--q": None, "--k": None, "--v": None}, ["--q", "missing", "--input"]),
]

SHAPES = [
    ("q rank 1", {"--q": draw(8)}, ["q.npy", "rank 1", "[N, d]"]),
    ("q rank 0", {"--q": draw()}, ["q.npy", "rank 0", "[N, d]"]),
    ("q rank 5", {"--q": draw(1, 1, 2, 10, 8)}, ["q.npy", "rank 5", "[N, d]"]),
    ("k of another rank", {"--k": draw(1, 2, 10, 8)}, ["k.npy", "rank 4", "3"]),
    ("v of another rank", {"--v": draw(10, 8)}, ["v.npy", "rank 2", "3"]),
    ("k of another length", {"--k": draw(2, 11, 8)}, ["[2, 10, 8]", "length 10", "11"]),
    ("v of another length", {"--v": draw(2, 9, 8)}, ["v.npy", "length 9", "10"]),
    ("k of another d", {"--k": draw(2, 10, 7)}, ["k.npy", "dimension 7", "8"]),
    ("v of other heads", {"--v": draw(1, 10, 8)}, ["v.npy", "heads", "1", "2"]),
    ("k of another batch", {f"--{x}": draw(3 if x == "k" else 2, 2, 4, 8) for x in "qkv"}, ["k.npy", "batch", "3"]),
    ("Hq no multiple of Hkv", {"--q": draw(3, 10, 8)}, ["3", "multiple", "2"]),
    ("Hq below Hkv", {"--q": draw(1, 10, 8)}, ["1", "multiple", "2"]),
    ("no heads", {f"--{x}": draw(0, 10, 8) for x in "qkv"}, ["0", "allowed"]),
    ("d of 0", {f"--{x}": draw(2, 10, 0) for x in "qk"}, ["head_dim", "0", "allowed"]),
    ("dv of 0", {"--v": draw(2, 10, 0)}, ["head_dim_v", "0", "allowed"]),
    ("d too large", {f"--{x}": draw(1, 1, 4097) for x in "qkv"}, ["head_dim", "4097", "allowed"]),
    ("q of i4", {"--q": np.zeros((2, 10, 8), "i4")}, ["q.npy", "i32", "allowed: f16, bf16, f32, f64"]),
    ("q of bool", {"--q": np.zeros((2, 10, 8), bool)}, ["q.npy", "bool", "allowed: f16, bf16, f32, f64"]),
    ("k of u1", {"--k": np.zeros((2, 10, 8), "u1")}, ["k.npy", "u8", "allowed"]),
    ("k of another type", {"--k": draw(2, 10, 8, dtype="f2")}, ["k.npy", "f16", "f32"]),
    ("v of another type", {"--v": draw(2, 10, 8, dtype="f8")}, ["v.npy", "f64", "f32"]),
    ("mask does not broadcast", {"--mask": np.ones((10, 9), bool)}, ["[10, 9]", "broadcast", "[1, 2, 10, 10]"]),
    ("mask of other heads", {"--mask": draw(3, 10, 10)}, ["[3, 10, 10]", "broadcast", "[1, 2, 10, 10]"]),
    ("mask of length 0", {"--mask": draw(10, 0)}, ["[10, 0]", "broadcast"]),
    ("mask of rank 5", {"--mask": draw(1, 1, 2, 10, 10)}, ["mask.npy", "rank 5", "0 to 4"]),
    ("mask of i4", {"--mask": np.ones((10, 10), "i4")}, ["mask.npy", "i32", "allowed: bool"]),
    ("mask and causal", {"--mask": np.ones((10, 10), bool), "--causal": "top-left"}, ["mask", "causal", "allowed"]),
]

ORDERS = [
    ("order of another shape", {**ORDER, "--order": order(shape=(2, 2, 8))}, ["[2, 2, 8]", "allowed: [2, 1, 8]"]),
    ("order of another d", {**ORDER, "--order": order(shape=(2, 1, 9))}, ["[2, 1, 9]", "allowed: [2, 1, 8]"]),
    ("order of rank 1", {**ORDER, "--order": order(shape=(8,))}, ["[8]", "allowed: [2, 1, 8]"]),
    ("order repeats", {**ORDER, "--order": order(((1, 0, 5), 4))}, ["row 1", "entry 5 is 4", "0 to 7"]),
    ("order negative", {**ORDER, "--order": order(((0, 0, 2), -1))}, ["entry 2 is -1", "0 to 7"]),
    ("order too large", {**ORDER, "--order": order(((0, 0, 7), 8))}, ["entry 7 is 8", "0 to 7"]),
    ("order wraps in i4", {**ORDER, "--order": order(((0, 0, 1), 2**32 + 1), dtype="i8")}, ["4294967297", "0 to 7"]),
    ("order of floats", {**ORDER, "--order": order(dtype="f4")}, ["order.npy", "f32", "allowed: any integer"]),
    ("order of bool", {**ORDER, "--order": order(dtype="b1")}, ["order.npy", "bool", "allowed: any integer"]),
    ("order missing", {**ORDER, "--order": "{in}/none.npy"}, ["none.npy", "No such file"]),
    ("order for exact", {**EXACT, "--order": order()}, ["--order: ", "exact", "allowed: no order"]),
    ("exact with a group size", {**EXACT, "--group-size": 2}, ["--group-size: '2'", "exact", "allowed: 1"]),
    ("exact with an estimator", {**EXACT, "--estimator": "sample"}, ["'sample'", "exact", "allowed: mean"]),
    ("exact with order-from", {**EXACT, "--order-from": "own"}, ["'own'", "exact", "allowed: auto"]),
]

WORDS = ["nothing", "", " 2", "2 ", "1e1", "1.5", "0x2", "+2", "-1", "nan", "inf", "2,4", "\u00b2", "9" * 23]
OPTIONS = [
    *[(f"group size {x!r}", {"--group-size": x}, ["--group-size", repr(x), "1 to"]) for x in [*WORDS, "0"]],
    *[(f"block {x!r}", {"--block": x}, ["--block", repr(x), "1 to"]) for x in [*WORDS, "0", "9223372036854775808"]],
    *[(f"threads {x!r}", {"--threads": x}, ["--threads", repr(x), "1 to"]) for x in [*WORDS, "0", "1000000"]],
    *[(f"seed {x!r}", {"--seed": x}, ["--seed", repr(x), "0 to"]) for x in [*WORDS, "18446744073709551616"]],
    *[
        (f"window size {x!r}", {"--window-size": x}, ["--window-size", "allowed: LEFT,RIGHT"])
        for x in ["", "4", "1,2,3", "-1"]
    ],
    *[
        (f"window size {x!r}", {"--window-size": x}, ["--window-size", "0 to 1099511627776"])
        for x in ["4,", ",4", "-2,0", "1.5,1", "1, 2", "1099511627777,0"]
    ],
    *[(f"softcap {x!r}", {"--softcap": x}, ["softcap", "allowed: "]) for x in ["x", "", "nan", "-1", "1e-50", "1e39"]],
    ("softcap with skip", {"--softcap": "2", "--sinks": "1", "--skip": "0.1"}, ["softcap is 2", "skip", "one of them"]),
    *[
        (f"scale {x!r}", {"--scale": x}, ["--scale", repr(x), "finite number"])
        for x in ["", "x", "nan", "-nan", "inf", "-inf", "infinity", "1e999", "1,5", "1.5x", "0x1p2", " 1", "--", "1 2"]
    ],
    *[
        (f"{flag} {x!r}", {flag: x}, [flag, repr(x), "allowed", allowed])
        for flag, allowed in [
            ("--strategy", ", ".join(STRATEGIES)),
            ("--estimator", "sample, mean"),
            ("--order-from", "auto, own, previous"),
            ("--causal", "none, top-left, bottom-right"),
            ("--device", "auto, cpu, cuda"),
            ("--dtype", "f16, bf16, f32, f64"),
        ]
        for x in ["", "nothing", "EXACT", "0", "a,b"]
    ],
    *[
        (f"group size beyond d, {strategy}", {"--group-size": 9, "--strategy": strategy}, ["group_size", "9", "1 to 8"])
        for strategy in STRATEGIES
        if strategy != "exact"
    ],
    ("device cuda", {"--device": "cuda"}, ["--device: cuda cannot be used: ", "allowed: auto, cpu"]),
    ("unknown option", {"--nonsense": "1"}, ["'--nonsense' is unknown", "--help"]),
    ("abbreviated option", {"--strat": "exact"}, ["--strat", "--help"]),
    ("option twice", {"--seed": [1, 2]}, ["--seed"]),
    ("q twice", {"--q": ["a.npy", "b.npy"]}, ["--q"]),
    ("stray word", {"": "stray"}, ["stray", "--help"]),
    ("no out", {"--out": None}, ["--out", "required"]),
    ("no k", {"--k": None}, ["--k", "missing", "needed"]),
]

OUTPUTS = [
    ("out folder missing", {"--out": "{out}/none/o.npy"}, ["none/o.npy", "existing folder"]),
    ("out folder a file", {"--out": "{in}/good-q.npy/o.npy"}, ["good-q.npy/o.npy", "folder"]),
    ("out a folder", {"--out": "{in}"}, ["{in}", ".npy"]),
    ("out a folder with extension", {"--out": "{in}/folder.npy"}, ["folder.npy", "is a folder", "regular file"]),
    ("out ends in a slash", {"--out": "{out}/o.npy/"}, ["{out}/o.npy/"]),
    ("out empty", {"--out": ""}, ["--out", "''", "allowed"]),
    ("out without extension", {"--out": "{out}/o"}, ["{out}/o", "allowed: .npy, .safetensors"]),
    ("out of another type", {"--out": "{out}/o.txt"}, ["'.txt'", "allowed: .npy, .safetensors"]),
    ("out /dev/full", {"--out": "/dev/full"}, ["/dev/full", "allowed"]),
    ("out link to /dev/full", {"--out": "{in}/full.npy"}, ["full.npy", "device", "regular file"]),
    ("out a pipe", {"--out": "{in}/pipe.npy"}, ["pipe.npy", "pipe", "regular file"]),
    ("out name too long", {"--out": "{out}/" + "x" * 300 + ".npy"}, ["xxx", "too long"]),
    ("lse folder missing", {"--lse": "{out}/none/l.npy"}, ["none/l.npy", "existing folder"]),
    ("lse /dev/full", {"--lse": "/dev/full"}, ["/dev/full", "allowed"]),
    ("lse of another type", {"--lse": "{out}/l.pt"}, ["--lse", "'.pt'", "allowed: .npy, .safetensors"]),
    ("order-out folder missing", {"--order-out": "{out}/none/p.npy"}, ["none/p.npy", "existing folder"]),
    ("out is lse", {"--lse": "{out}/o.npy"}, ["{out}/o.npy", "same file", "own path"]),
    ("out is lse by another path", {"--lse": "{out}/../out/o.npy"}, ["{out}/../out/o.npy", "same file", "own path"]),
    ("out is order-out", {"--order-out": "{out}/o.npy"}, ["{out}/o.npy", "same file", "own path"]),
    ("lse is order-out", {"--lse": "{out}/x.npy", "--order-out": "{out}/x.npy"}, ["{out}/x.npy", "same file"]),
]

CALLS = [*FILES, *SAFETENSORS, *SHAPES, *ORDERS, *OPTIONS, *OUTPUTS]
