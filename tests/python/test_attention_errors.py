# SPDX-License-Identifier: Apache-2.0
"""What scaled_dot_product_attention refuses: each error names the argument, its value and what is allowed."""

import gc
import logging
import math
import weakref

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from distrattention import Settings, explain, scaled_dot_product_attention


def tensors(**options):
    return {name: torch.randn(2, 4, 9, 8, **options) for name in ("query", "key", "value")}


def changed(**changes):
    return lambda: tensors() | {name: change() for name, change in changes.items()}


def nested():
    return torch.nested.nested_tensor([torch.randn(4, 9, 8), torch.randn(4, 5, 8)], layout=torch.strided)


def jagged():
    return torch.nested.nested_tensor([torch.randn(4, 8), torch.randn(2, 8)], layout=torch.jagged)


R = torch.randn
REFUSED = {
    "dropout": (changed(dropout_p=lambda: 0.1), NotImplementedError, "dropout_p is 0.1; allowed: 0"),
    "negative dropout": (changed(dropout_p=lambda: -1), NotImplementedError, "dropout_p is -1"),
    "mask and causal": (
        changed(attn_mask=lambda: R(9, 9), is_causal=lambda: True),
        ValueError,
        "attn_mask and is_causal=True were both given; allowed: one of them",
    ),
    "a list": (changed(key=lambda: [1.0]), TypeError, "key is of type list; allowed: torch.Tensor"),
    "a numpy array": (changed(query=lambda: R(2, 4, 9, 8).numpy()), TypeError, "query is of type ndarray"),
    "integers": (
        lambda: {n: t.int() for n, t in tensors().items()},
        TypeError,
        "query is torch.int32; allowed: float16",
    ),
    "complex": (lambda: tensors(dtype=torch.complex64), TypeError, "query is torch.complex64"),
    "float8": (lambda: {n: t.to(torch.float8_e4m3fn) for n, t in tensors().items()}, TypeError, "torch.float8_e4m3fn"),
    "two dtypes": (
        changed(value=lambda: R(2, 4, 9, 8).double()),
        TypeError,
        "value is torch.float64; allowed: torch.fl",
    ),
    "two devices": (changed(key=lambda: R(2, 4, 9, 8, device="meta")), TypeError, "key is on meta; allowed: cpu"),
    "a mask elsewhere": (changed(attn_mask=lambda: R(9, 9, device="meta")), TypeError, "attn_mask is on meta"),
    "one axis": (
        lambda: {n: R(8) for n in ("query", "key", "value")},
        ValueError,
        "query has 1 axis; allowed: 2 or more$",
    ),
    "other rank": (changed(key=lambda: R(4, 9, 8)), ValueError, "key has 3 axes; allowed: 4, as many as query$"),
    "other batch": (
        changed(key=lambda: R(3, 4, 9, 8)),
        ValueError,
        r"leading sizes of key are \(3,\); allowed: \(2,\)",
    ),
    "other columns": (changed(key=lambda: R(2, 4, 9, 7)), ValueError, "last size of key is 7; allowed: 8"),
    "other rows": (changed(value=lambda: R(2, 4, 8, 8)), ValueError, "value has 8 rows; allowed: 9"),
    "fewer heads": (
        changed(key=lambda: R(2, 2, 9, 8), value=lambda: R(2, 2, 9, 8)),
        ValueError,
        "key has 2 heads; allowed: 4, as query, or enable_gqa=True",
    ),
    "heads that do not divide": (
        changed(key=lambda: R(2, 3, 9, 8), value=lambda: R(2, 3, 9, 8), enable_gqa=lambda: True),
        ValueError,
        "key has 3 heads; allowed: a divisor of 4",
    ),
    "no heads to share": (
        changed(key=lambda: R(2, 0, 9, 8), value=lambda: R(2, 0, 9, 8), enable_gqa=lambda: True),
        ValueError,
        "key has 0 heads; allowed: a divisor of 4",
    ),
    "two numbers of kv heads": (
        changed(key=lambda: R(2, 2, 9, 8), enable_gqa=lambda: True),
        ValueError,
        "value has 4 heads; allowed: 2, as many as key",
    ),
    "an integer mask": (
        changed(attn_mask=lambda: torch.ones(9, 9).int()),
        TypeError,
        "attn_mask is torch.int32; allowed",
    ),
    "a double mask": (
        changed(attn_mask=lambda: R(9, 9).double()),
        TypeError,
        "attn_mask is torch.float64; allowed: bool",
    ),
    "a mask too short": (
        changed(attn_mask=lambda: R(9, 8)),
        ValueError,
        r"shape of attn_mask is \(9, 8\); allowed: what",
    ),
    "a mask of more axes": (
        changed(attn_mask=lambda: R(1, 1, 1, 9, 9)),
        ValueError,
        r"\(1, 1, 1, 9, 9\); allowed: what",
    ),
    "a mask that would grow the batch": (changed(attn_mask=lambda: R(3, 1, 9, 9)), ValueError, "broadcasts to"),
    "a multiplicative head mask": (changed(attn_mask=lambda: R(4)), ValueError, r"attn_mask is \(4,\); allowed: what"),
    "nested": (
        lambda: dict.fromkeys(("query", "key", "value"), nested()),
        NotImplementedError,
        "query is a nested tensor",
    ),
    "jagged": (
        lambda: dict.fromkeys(("query", "key", "value"), jagged()),
        NotImplementedError,
        "query is a nested tensor",
    ),
    "sparse": (
        changed(key=lambda: R(2, 4, 9, 8).to_sparse()),
        NotImplementedError,
        "key is of layout torch.sparse_coo",
    ),
    "no columns": (
        lambda: {n: R(2, 4, 9, 0) for n in ("query", "key", "value")},
        ValueError,
        "last size of query is 0; allowed: 1 to 512",
    ),
    "too many columns": (
        lambda: {n: R(2, 4, 9, 600) for n in ("query", "key", "value")},
        ValueError,
        "last size of query is 600; allowed: 1 to 512",
    ),
    "no columns of V": (changed(value=lambda: R(2, 4, 9, 0)), ValueError, "last size of value is 0; allowed: 1 to"),
    "too many columns of V": (changed(value=lambda: R(2, 4, 9, 513)), ValueError, "value is 513; allowed: 1 to 512"),
    "no scale": (changed(scale=lambda: math.nan), ValueError, "scale is nan; allowed: a finite number"),
    "an infinite scale": (changed(scale=lambda: -math.inf), ValueError, "scale is -inf; allowed: a finite number"),
    "a scale too large": (changed(scale=lambda: 1e39), ValueError, r"scale is 1e\+39; allowed: .* float32 holds"),
    "a scale of letters": (changed(scale=lambda: "a"), TypeError, "scale is of type str; allowed: None or a number"),
    "a learned scale": (
        changed(scale=lambda: torch.ones((), requires_grad=True)),
        TypeError,
        "scale is of type Tensor; allowed: None or a number, which gets no gradient",
    ),
    "a list beside a causal bias": (
        changed(query=lambda: [1.0], attn_mask=lambda: causal_lower_right(9, 9)),
        TypeError,
        "query is of type list; allowed: torch.Tensor",
    ),
    "one axis beside a causal bias": (
        lambda: {n: R(8) for n in ("query", "key", "value")} | {"attn_mask": causal_lower_right(1, 1)},
        ValueError,
        "query has 1 axis; allowed: 2 or more$",
    ),
    "a strategy": (
        changed(strategy=lambda: "fast"),
        ValueError,
        "strategy is 'fast'; allowed: 'auto', 'exact', 'lsh', 'en",
    ),
    "an estimator": (changed(estimator=lambda: "max"), ValueError, "estimator is 'max'; allowed: 'sample', 'mean'"),
    "an order": (
        changed(order_from=lambda: "next"),
        ValueError,
        "order_from is 'next'; allowed: 'auto', 'own', 'previous'",
    ),
    "groups of none": (changed(group_size=lambda: 0), ValueError, "group_size is 0; allowed: 1 to"),
    "groups too large": (changed(group_size=lambda: 9), ValueError, "group_size is 9; allowed: 1 to 8"),
    "groups of a half": (changed(group_size=lambda: 2.0), TypeError, "group_size is 2.0; allowed: an int"),
    "groups of a half, numpy's": (changed(group_size=lambda: np.float32(2)), TypeError, "group_size is .*an int"),
    "groups of True": (changed(group_size=lambda: True), TypeError, "group_size is True; allowed: an int"),
    "blocks of none": (changed(block_size=lambda: 0), ValueError, "block_size is 0; allowed: 1 to"),
    "a negative seed": (changed(seed=lambda: -1), ValueError, "seed is -1; allowed: 0 to"),
    "a seed too large": (changed(seed=lambda: 2**63), ValueError, "seed is 9223372036854775808; allowed: 0 to"),
}


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO], ids=["short way", "long way"])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, level, caplog):
    """Where the choice of auto is logged, calls take the long way."""
    caplog.set_level(level, logger="distrattention")
    arguments, error, message = REFUSED[what]
    with pytest.raises(error, match=message) as raised:
        scaled_dot_product_attention(**arguments())
    assert raised.value.__context__ is None or raised.value.__suppress_context__


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(value=(1, 2, 9, 0)), ValueError, "the last size of value is 0; allowed: 1 to 512"),
        (dict(key=(1, 2, 9, 7)), ValueError, "the last size of key is 7; allowed: 8, as query"),
        (dict(scale=math.nan), ValueError, "scale is nan; allowed: a finite number"),
    ],
)
def test_tensors_without_data_are_refused_in_the_same_words(change, error, message):
    sizes = dict.fromkeys(("query", "key", "value"), (1, 2, 9, 8)) | change
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(
            **{name: size if name == "scale" else R(size, device="meta") for name, size in sizes.items()}
        )


def test_a_call_that_is_refused_keeps_no_tensor():
    query = R(1, 2, 9, 8)
    gone = weakref.ref(query)
    with pytest.raises(ValueError):
        scaled_dot_product_attention(query, R(1, 2, 9, 7), R(1, 2, 9, 8))
    gc.disable()
    try:
        del query
        assert gone() is None
    finally:
        gc.enable()


def test_unknown_keywords_are_not_swallowed():
    with pytest.raises(TypeError, match="alibi_slopes"):
        scaled_dot_product_attention(**tensors(), alibi_slopes=None)


def test_exact_and_one_column_need_no_group_size():
    """The default group_size of 2 is no reason to refuse heads of one column; `exact` has none."""
    one = torch.randn(2, 5, 1)
    assert scaled_dot_product_attention(one, one, one).shape == one.shape
    eight = torch.randn(2, 5, 8)
    assert scaled_dot_product_attention(eight, eight, eight, strategy="exact", group_size=1).shape == eight.shape


def test_numbers_of_numpy_and_torch_are_numbers():
    assert Settings(group_size=np.int32(4), block_size=np.int64(16), seed=np.uint8(3)) == Settings(
        group_size=4, block_size=16, seed=3
    )
    assert type(Settings(group_size=np.int32(4)).group_size) is int
    plain = scaled_dot_product_attention(**(given := tensors()), scale=0.5)
    for scale in (np.float32(0.5), torch.tensor(0.5)):
        assert torch.equal(scaled_dot_product_attention(**given, scale=scale), plain)


def test_a_setting_that_changes_is_read_in_each_call():
    """Settings of calls before are remembered, but not by a tensor, which may hold something else by now."""
    given, size = tensors() | {"strategy": "energy"}, torch.tensor(2)
    for value in (2, 4):
        expected = scaled_dot_product_attention(**given, group_size=value)
        assert torch.equal(scaled_dot_product_attention(**given, group_size=size.fill_(value)), expected)
    with pytest.raises(TypeError, match=r"group_size is \[2\]; allowed: an int"):
        scaled_dot_product_attention(**given, group_size=[2])


def test_explain_refuses_what_attention_refuses():
    for name in ("too many columns", "no scale", "a list beside a causal bias"):
        arguments, error, message = REFUSED[name]
        with pytest.raises(error, match=message):
            explain(**arguments())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(group_size=4), "group_size is 4 with strategy 'exact'; allowed: None, 1, as nothing is grouped"),
        (dict(estimator="sample"), "estimator is 'sample' with strategy 'exact'; allowed: 'mean', as nothing"),
    ],
)
def test_exact_attention_has_no_groups(keywords, message):
    with pytest.raises(ValueError, match=message):
        Settings("exact", **keywords)
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(**tensors(), strategy="exact", **keywords)
    assert Settings("exact").taken_group_size == Settings("exact", 1).taken_group_size == 1


def test_settings_raise_when_they_are_made():
    for keywords in (dict(strategy="best"), dict(group_size=0), dict(block_size=-1), dict(order_from="mine")):
        with pytest.raises(ValueError, match="allowed"):
            Settings(**keywords)
    with pytest.raises(AttributeError):
        Settings().group_size = 3
