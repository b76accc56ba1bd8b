# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence whose rows lie on several processes, by torch.distributed (docs/distributed.md)."""

from distrattention.distributed.attention import attention
from distrattention.distributed.layout import positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
