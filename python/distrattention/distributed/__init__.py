# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence whose rows lie on several processes, by torch.distributed (docs/distributed.md)."""

from distrattention.distributed.agreement import DifferenceError
from distrattention.distributed.attention import attention
from distrattention.distributed.layout import positions, shard, unshard

__all__ = ["DifferenceError", "attention", "positions", "register_sharding_rules", "shard", "unshard"]


def register_sharding_rules() -> None:
    """Tells DTensor how attention may be sharded, so that scaled_dot_product_attention() and all that calls it take
    DTensors: by batch, and by heads where the heads of key are a multiple of the processes, or are one. What is sharded
    otherwise, by rows say, is gathered first. By torch.distributed.tensor.experimental.register_sharding. Calling it
    again does nothing.
    """
    from distrattention.distributed import sharding  # DTensor takes long to import

    sharding.register()
