# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.vmap: the mapped axis becomes a part of the batch."""

from distrattention.ops import backward, forward, make_grouping  # first, for it says in words what is missing

import torch  # isort: skip


def _fold(tensor, axis, size):
    """[V * B, ...] of a tensor [B, ...] that is mapped along `axis`, or shared by all V samples where that is None."""
    if tensor is None:
        return None
    mapped = tensor.unsqueeze(0).expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return mapped.flatten(0, 1)


def _fold_mask(mask, axis, size, batch, own_gradient):
    """The mask of the folded call; one that all samples share stays as it is unless each needs its own gradient."""
    if mask is None or (axis is None and not own_gradient and (mask.dim() < 4 or mask.shape[0] == 1)):
        return mask
    mapped = mask.unsqueeze(0).expand(size, *mask.shape) if axis is None else mask.movedim(axis, 0)
    mapped = mapped.reshape(size, *(1,) * (5 - mapped.dim()), *mapped.shape[1:])
    return mapped.expand(size, batch, *mapped.shape[2:]).flatten(0, 1)


def _unfold(tensor, size):
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


@torch.library.register_vmap("distrattention::make_grouping")
def _(info, axes, q, k, *settings):
    size = info.batch_size
    results = make_grouping(_fold(q, axes[0], size), _fold(k, axes[1], size), *settings)
    return tuple(_unfold(result, size) for result in results), (0, 0)


@torch.library.register_vmap("distrattention::forward")
def _(info, axes, q, k, v, mask=None, order=None, key_means=None, *settings):
    size = info.batch_size
    axes = (*axes, None, None, None)  # of a mask, an order and means that were left out
    q, k, v = (_fold(tensor, axis, size) for tensor, axis in zip((q, k, v), axes))
    mask = _fold_mask(mask, axes[3], size, q.shape[0] // size, False)
    columns = (_fold(tensor, axis, size) for tensor, axis in zip((order, key_means), axes[4:]))
    results = forward(q, k, v, mask, *columns, *settings)
    return tuple(_unfold(result, size) for result in results), (0, 0)


@torch.library.register_vmap("distrattention::backward")
def _(info, axes, grad_out, grad_lse, q, k, v, mask, order, key_means, out, lse, mask_gradient=False, *settings):
    size = info.batch_size
    grad_out, grad_lse, q, k, v, order, key_means, out, lse = (
        _fold(tensor, axis, size)
        for tensor, axis in zip((grad_out, grad_lse, q, k, v, order, key_means, out, lse), (*axes[:5], *axes[6:10]))
    )
    batch = q.shape[0] // size
    folded = _fold_mask(mask, axes[5], size, batch, mask_gradient)
    tensors = (grad_out, grad_lse, q, k, v, folded, order, key_means, out, lse)
    *grads, grad_mask = (_unfold(grad, size) for grad in backward(*tensors, mask_gradient, *settings))
    if mask_gradient and mask is not None:
        shape = mask.shape if axes[5] is None else mask.movedim(axes[5], 0).shape[1:]
        repeated = len(shape) < 4 or shape[0] == 1  # over the batch
        grad_mask = (grad_mask.sum(1) if repeated else grad_mask).reshape(size, *shape)
    return (*grads, grad_mask), (0, 0, 0, 0)
