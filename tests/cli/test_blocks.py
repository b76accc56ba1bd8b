# SPDX-License-Identifier: Apache-2.0
"""`distr blocks`: the rule's three readings on each GPU, and the paper's Table 2."""

import json

import pytest

LITERAL = {100: [(768, 16), (368, 16), (160, 16)], 228: [(1792, 16), (880, 16), (416, 16)]}
GPUS = {"3090": 100, "4090": 100, "L40": 100, "A100": 164, "H100": 228, "H200": 228}


@pytest.fixture
def blocks(run):
    """blocks(*options) -> the JSON object."""

    def run_blocks(*options):
        result = run("blocks", "--json", *options)
        assert (result.code, result.stderr) == (0, "")
        return json.loads(result.stdout)

    return run_blocks


def pairs(report, rule):
    """(l, m) of each d by one reading of the rule."""
    return [(row["l"], row["m"]) for row in report["rows"] if row["rule"] == rule]


@pytest.mark.parametrize("gpu", GPUS)
def test_named_gpus(blocks, gpu):
    report = blocks("--gpu", gpu)
    kilobytes = GPUS[gpu]
    assert (report["gpu"], report["shared_memory"], report["tensor_cores"]) == (gpu, kilobytes * 1024, 4)
    assert [row["head_dim"] for row in report["rows"]] == [d for d in (32, 64, 128) for _ in range(3)]
    if kilobytes in LITERAL:
        assert pairs(report, "literal") == LITERAL[kilobytes]
    if kilobytes == 100:
        assert pairs(report, "powers_of_two") == [(256, 256), (256, 64), (128, 32)]
        assert pairs(report, "registers") == [(256, 64), (256, 32), (128, 32)]
    assert len(report["paper"]) == (3 if kilobytes == 100 else 0)


@pytest.mark.parametrize("gpu", ["3090", "4090", "L40"])
def test_table_2(blocks, gpu):
    paper = blocks("--gpu", gpu)["paper"]
    assert [row["head_dim"] for row in paper] == [32, 64, 128]
    assert [row["flash"] for row in paper] == [[128, 128], [128, 128], [128, 32]]
    assert [row["ours"] for row in paper] == [[256, 64], [128, 128], [128, 32]]
    assert [row["best"] for row in paper] == [[256, 64] if gpu == "L40" else [128, 128], [128, 128], [128, 32]]


def test_what_binds(blocks):
    rows = {(row["head_dim"], row["rule"]): row for row in blocks("--gpu", "3090")["rows"]}
    keys = ("l_binds", "l_rounded_by", "m_binds", "m_rounded_by")

    def binding(head_dim, rule):
        return [rows[head_dim, rule][key] for key in keys]

    assert binding(32, "literal") == ["shared memory", None, "shared memory", None]
    assert binding(128, "literal") == ["shared memory", "multiple of 16"] * 2
    assert binding(32, "powers_of_two") == ["cap of 256", None] * 2
    assert binding(64, "powers_of_two") == ["cap of 256", None, "shared memory", "power of two"]
    assert binding(32, "registers") == ["cap of 256", None, "registers", "power of two"]
    assert rows[64, "registers"]["accumulators"] == 24576 == 128 * (128 + 64)


def test_sizes_by_hand(blocks):
    named = blocks("--gpu", "H100")
    for size in ("228KB", str(228 * 1024)):
        by_hand = blocks("--shared-memory", size)
        assert by_hand["gpu"] is None and by_hand["paper"] == [] and by_hand["rows"] == named["rows"]
    assert blocks("--shared-memory", "456KB", "--tensor-cores", "8")["rows"] == named["rows"]
    assert pairs(blocks("--gpu", "H100", "--warps", "8"), "literal")[2] == (2 * 456 - 32, 16)
    assert pairs(blocks("--gpu", "H100", "--element-bytes", "4"), "literal")[1] == LITERAL[228][2]
    assert [row["head_dim"] for row in blocks("--gpu", "H100", "--head-dim", "96")["rows"]] == [96] * 3


def test_table(run):
    result = run("blocks", "--gpu", "L40")
    assert (result.code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[:4] for line in lines if "literal  " in line] == [
        [str(d), "literal", str(l), str(m)] for d, (l, m) in zip((32, 64, 128), LITERAL[100])
    ]
    for word in ("Table 2, flash", "Table 2, ours", "Table 2, best", "l is bound by", "cap of 256", "Tie at d = 64"):
        assert word in result.stdout
    assert result.stdout.count("Tie at") == 1
    assert "Table 2" not in run("blocks", "--gpu", "H100").stdout


BAD = [
    ((), ["--gpu", "--shared-memory"]),
    (("--gpu", "3080"), ["--gpu", "'3080'", "3090, 4090, L40, A100, H100, H200"]),
    (("--gpu", ""), ["--gpu", "''"]),
    (("--gpu", "3090", "--shared-memory", "100KB"), ["--gpu", "--shared-memory"]),
    (("--gpu", "3090", "--tensor-cores", "8"), ["--gpu", "--tensor-cores"]),
    (("--shared-memory", "KB"), ["--shared-memory", "'KB'"]),
    (("--shared-memory", "-1"), ["--shared-memory", "'-1'"]),
    (("--shared-memory", "100MB"), ["--shared-memory", "'100MB'"]),
    (("--shared-memory", "99999KB"), ["--shared-memory", "16384"]),
    (("--shared-memory", "1KB"), ["no block fits", "head_dim 32", "shared memory"]),
    (("--gpu", "3090", "--head-dim", "0"), ["--head-dim", "'0'"]),
    (("--gpu", "3090", "--head-dim", "64,"), ["--head-dim", "''"]),
    (("--gpu", "3090", "--warps", "0"), ["--warps", "'0'"]),
    (("--gpu", "3090", "--element-bytes", "9"), ["--element-bytes", "'9'"]),
]


@pytest.mark.parametrize("words, expected", BAD, ids=[" ".join(words) or "nothing" for words, _ in BAD])
def test_bad_values(run, words, expected):
    result = run("blocks", *words)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("distr blocks: ") and result.stderr.count("\n") == 1
    for word in expected:
        assert word in result.stderr
