# SPDX-License-Identifier: Apache-2.0
"""`distr attend`: the order of columns, and the approximations that follow from it, against NumPy."""

import itertools
import json

import numpy as np
import oracle
import pytest
from oracle import Setting
from strategies import STRATEGIES

OUTPUTS = ("--lse", "--order-out")
TOLERANCE = {"f2": 4e-3, "f4": 6e-6, "f8": 1e-13}
SETTINGS = [
    Setting(strategy, group_size, block, estimator, order_from)
    for strategy, group_size, block, estimator, order_from in itertools.product(
        oracle.ORDERS, (2, 5, 12), (16, 40), ("sample", "mean"), ("own", "previous")
    )
    if strategy == "lsh" or estimator == "mean"
]


def name_of(setting):
    """For the names of tests."""
    return f"{setting.strategy}-{setting.estimator}-G{setting.group_size}-l{setting.block}-{setting.order_from}"


def check(result, q, k, v, setting, order, **options):
    """O and LSE against the oracle's, which is given the same order."""
    o, lse = oracle.attention(q, k, v, setting, order, **options)
    dtype = result.files["--out"].dtype
    bound = TOLERANCE[dtype.str[1:]]
    np.testing.assert_allclose(result.files["--out"], o, rtol=0, atol=bound * max(1, abs(o).max()))
    np.testing.assert_allclose(result.files["--lse"], lse, rtol=1e-6, atol=max(bound, 2e-6))


def test_philox_of_the_oracle_gives_the_published_numbers():
    """The known answers of Random123 for philox4x32-10."""
    assert oracle.philox((0,) * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert oracle.philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_gray_rank_of_the_oracle_inverts_the_gray_code():
    assert [oracle.gray_rank(rank ^ rank >> 1) for rank in range(1 << 10)] == list(range(1 << 10))


def test_the_oracle_knows_every_order_that_is_computed():
    assert sorted(oracle.ORDERS) == sorted({*STRATEGIES} - {"auto", "exact", "given"})


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_approximation_with_the_order_that_was_written(attend, problem, setting):
    for dtype in ("f4", "f2") if setting.block == 16 else ("f4",):
        q, k, v = problem((2, 4, 70, 12), (2, 2, 50, 12), dv=5, dtype=dtype)
        result = attend(q, k, v, *setting.flags(), outputs=OUTPUTS)
        order = result.files["--order-out"]
        assert order.dtype == np.dtype("<i4") and order.shape == (2, 4, -(-70 // setting.block), 12)
        assert np.array_equal(np.sort(order, axis=-1), np.broadcast_to(np.arange(12), order.shape))
        check(result, q, k, v, setting, order)


@pytest.mark.parametrize("corner", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_order_and_output_of_the_reference(attend, problem, setting, corner):
    q, k, v = problem((1, 4, 70, 12), (1, 2, 90, 12), dv=5, dtype="f8")
    result = attend(q, k, v, *setting.flags(), "--causal", corner, outputs=OUTPUTS)
    order = oracle.orders(q, k, setting, corner)
    np.testing.assert_array_equal(result.files["--order-out"], order)
    check(result, q, k, v, setting, order, causal=corner)


@pytest.mark.parametrize("seed", [1, 0x123456789, 2**64 - 1])
def test_seed_draws_other_orders(attend, problem, seed):
    q, k, v = problem((70, 24), dtype="f8")
    setting = Setting("lsh", 2, 70, seed=seed)
    result = attend(q, k, v, *setting.flags(), outputs=OUTPUTS)
    order = oracle.orders(oracle.widened(q), oracle.widened(k), setting)
    np.testing.assert_array_equal(result.files["--order-out"], order[0, 0])
    assert not np.array_equal(order, oracle.orders(oracle.widened(q), oracle.widened(k), Setting("lsh", 2, 70)))


@pytest.mark.parametrize("strategy", oracle.ORDERS)
def test_order_in_fp32_is_that_of_the_reference(attend, strategy):
    """Sums of small whole numbers are exact in fp32, or, times a quantile, far from 0: rounding moves no column."""
    generator = np.random.default_rng(3)
    q, k, v = (generator.integers(-8, 9, (2, 64, 24)).astype("f4") for _ in range(3))
    k[:, -1] -= k.sum(axis=1)  # the mean of each column is 0
    setting = Setting(strategy, 2, 32)
    result = attend(q, k, v, *setting.flags(), outputs=OUTPUTS)
    np.testing.assert_array_equal(
        result.files["--order-out"], oracle.orders(oracle.widened(q), oracle.widened(k), setting)[0]
    )


@pytest.mark.parametrize("lead", [(), (2,), (2, 4)], ids=["rank2", "rank3", "rank4"])
def test_order_has_the_rank_of_the_input(attend, problem, lead):
    q, k, v = problem((*lead, 50, 8))
    for strategy in ("exact", "lsh"):
        result = attend(q, k, v, "--strategy", strategy, "--block", "20", outputs=OUTPUTS)
        assert result.files["--order-out"].shape == (*lead, 3, 8)


@pytest.mark.parametrize("options", [("--strategy", "exact"), ("--strategy", "lsh", "--group-size", "1"), ()], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_order_of_exact_attention_is_the_identity(attend, problem, options, dtype):
    q, k, v = problem((2, 50, 8), dtype=dtype)
    order = attend(q, k, v, *options, "--block", "20", outputs=OUTPUTS).files["--order-out"]
    np.testing.assert_array_equal(order, np.broadcast_to(np.arange(8), (2, 3, 8)))


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u2"])
@pytest.mark.parametrize(
    "setting",
    [Setting("lsh", 3, 16), Setting("lsh", 3, 16, "sample"), *(Setting(name, 3, 16) for name in ("energy", "given"))],
)
def test_given_order(attend, problem, save, setting, dtype):
    q, k, v = problem((2, 40, 12))
    order = np.random.default_rng(4).permuted(np.tile(np.arange(12), (2, 3, 1)), axis=-1)
    path = save("order", order.astype(dtype))
    result = attend(q, k, v, *setting.flags(), "--order", path, outputs=OUTPUTS)
    np.testing.assert_array_equal(result.files["--order-out"], order)
    check(result, q, k, v, setting, order[None])


def test_a_strategy_without_an_order_of_its_own_asks_for_one(run, problem, save, tmp_path):
    words = [word for name, x in zip("qkv", problem((2, 40, 12))) for word in (f"--{name}", save(name, x))]
    result = run("attend", *words, "--out", tmp_path / "o.npy", "--strategy", "given")
    assert result.code == 2 and not (tmp_path / "o.npy").exists()
    assert "--strategy: 'given' computes no order; allowed: --order FILE" in result.stderr


def test_given_order_may_have_rank_four(attend, problem, save):
    q, k, v = problem((40, 12))
    order = np.random.default_rng(4).permuted(np.tile(np.arange(12), (1, 1, 3, 1)), axis=-1)
    setting = Setting("lsh", 2, 16)
    check(attend(q, k, v, *setting.flags(), "--order", save("order", order)), q, k, v, setting, order)


def test_written_order_reproduces_the_output(attend, problem, save):
    q, k, v = problem((2, 100, 16))
    setting = Setting("energy", 2, 32)
    first = attend(q, k, v, *setting.flags(), outputs=OUTPUTS)
    order = save("order", first.files["--order-out"])
    second = attend(q, k, v, *setting.flags(), "--order", order)
    assert first.files["--out"].tobytes() == second.files["--out"].tobytes()


def test_previous_leaves_the_first_block_exact_whatever_the_order_given(attend, problem, save):
    q, k, v = problem((40, 12))
    order = np.random.default_rng(4).permuted(np.tile(np.arange(12), (3, 1)), axis=-1)
    setting = Setting("lsh", 3, 16, order_from="previous")
    result = attend(q, k, v, *setting.flags(), "--order", save("order", order))
    check(result, q, k, v, setting, order[None, None])
    exact = attend(q, k, v, "--strategy", "exact")
    np.testing.assert_allclose(result.files["--out"][:16], exact.files["--out"][:16], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [("lsh", "--order-from", "previous"), ("lsh", "--group-size", "1")])
def test_written_order_is_the_identity_where_attention_is_exact_whatever_the_order_given(
    attend, problem, save, options
):
    q, k, v = problem((40, 12))
    order = np.random.default_rng(4).permuted(np.tile(np.arange(12), (3, 1)), axis=-1)
    flags = ("--strategy", *options, "--block", "16", "--order", save("order", order))
    written = attend(q, k, v, *flags, outputs=OUTPUTS).files["--order-out"]
    np.testing.assert_array_equal(written[0], np.arange(12))
    np.testing.assert_array_equal(written[1:], order[1:] if "previous" in options else np.tile(np.arange(12), (2, 1)))


@pytest.mark.parametrize("strategy", oracle.ORDERS)
def test_previous_never_looks_ahead(attend, problem, strategy):
    q, k, v = problem((2, 64, 16))
    flags = (*Setting(strategy, 2, 16, order_from="previous").flags(), "--causal", "top-left")
    before = attend(q, k, v, *flags).files["--out"]
    for x in (q, k, v):
        x[:, 40:] = 3 * x[:, 40:] + 1
    after = attend(q, k, v, *flags).files["--out"]
    np.testing.assert_array_equal(before[:, :40], after[:, :40])
    assert not np.array_equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("strategy", oracle.ORDERS)
def test_causal_calls_take_previous_unless_own_is_named(attend, problem, strategy):
    inputs = problem((2, 64, 16))
    flags = ("--strategy", strategy, "--group-size", "2", "--block", "16", "--json")

    def run(*more):
        result = attend(*inputs, *flags, *more)
        report = json.loads(result.stdout)
        return result.files["--out"].tobytes(), report["order_from"], report["choice"]

    causal = ("--causal", "bottom-right")
    own, previous = (run(*causal, "--order-from", order_from) for order_from in ("own", "previous"))
    assert own[1:] == ("own", "as asked for") and previous[1:] == ("previous", "as asked for")
    chosen = "as asked for; orders come from the block before, as the call is causal"
    assert run(*causal) == (previous[0], "previous", chosen) and own[0] != previous[0]
    assert run()[1:] == ("own", "as asked for")


def test_a_causal_call_of_one_block_is_refused_unless_it_is_short(run, save, attend, problem, tmp_path):
    long = problem((140, 8))
    files = [word for name, x in zip("qkv", long) for word in (f"--{name}", save(name, x))]
    for command in ("attend", "--strategy", "energy", "--out", tmp_path / "o.npy"), ("compare",):
        refused = run(*command, *files, "--block", "200", "--causal", "top-left")
        expected = "block is 200, one for all 140 rows of a causal call, whose orders come from the block before: it "
        expected += "would be exact; allowed: a block of at most 139 rows, or order_from own"
        assert (refused.code, refused.stderr) == (2, f"distr {command[0]}: {expected}\n")
    assert not (tmp_path / "o.npy").exists()
    attend(*long, "--strategy", "energy", "--block", "200", "--causal", "top-left", "--order-from", "own")
    short = attend(*problem((120, 8)), "--strategy", "energy", "--causal", "top-left", "--json")
    assert json.loads(short.stdout)["choice"].startswith("exact, as the only block has none before it")


@pytest.mark.parametrize("setting", [Setting("lsh", 2, 16), Setting("energy", 2, 16)], ids=name_of)
def test_approximation_with_a_mask_and_a_scale(attend, problem, setting):
    q, k, v = problem((2, 40, 12), (2, 30, 12), dtype="f8")
    mask = np.random.default_rng(5).random((40, 30)) < 0.5
    order = oracle.orders(oracle.widened(q), oracle.widened(k), setting)
    result = attend(q, k, v, *setting.flags(), "--scale", "0.7", mask=mask)
    check(result, q, k, v, setting, order, mask=mask, scale=0.7)


@pytest.mark.parametrize("block", [70, 71, 10**6, 2**63 - 1])
def test_block_longer_than_the_rows(attend, problem, block):
    q, k, v = problem((70, 12), dtype="f8")
    setting = Setting("energy", 2, block)
    order = oracle.orders(oracle.widened(q), oracle.widened(k), Setting("energy", 2, 70))
    result = attend(q, k, v, *setting.flags(), outputs=OUTPUTS)
    np.testing.assert_array_equal(result.files["--order-out"], order[0, 0])
    check(result, q, k, v, Setting("energy", 2, 70), order)
