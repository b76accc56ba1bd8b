# SPDX-License-Identifier: Apache-2.0
"""What processes tell each other before they compute, so that each of them knows where one differs or has failed."""

import json

from distrattention import core  # noqa: F401; first, for it says in words what is missing

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

_BYTES = 4096  # of a message
_LONGEST = 2000  # characters of an error


class DifferenceError(ValueError):
    """The processes of a group called with settings or shapes that differ, or one of them could not call at all."""


def agree(group, fields, rows, error, tensor):
    """The `rows` of each rank of the group, which may differ. All ranks call it.

    fields: a dict of what must be the same on all ranks, in words or numbers. error: what keeps this rank from going
    on, an exception or None. tensor: one of the call, on whose device messages lie where they cannot be on the CPU.
    Raises on every rank where one has an error (there, the error itself) or another field.
    """
    if group is None:
        if error is not None:
            raise error
        return [rows]
    told = None
    if error is not None:  # then the fields do not matter, and what is told fits in whatever its characters are
        told, fields = ascii(f"{type(error).__name__}: {error}")[1:-1][:_LONGEST], None
    message = json.dumps({"error": told, "fields": fields, "rows": rows}).encode()
    assert len(message) <= _BYTES
    found = _all_messages(group, message, tensor)
    if error is not None:
        raise error
    for rank, message in enumerate(found):
        if message["error"] is not None:
            raise DifferenceError(f"rank {rank} of the group cannot take part: {message['error']}")
    for rank, message in enumerate(found):
        for name, value in found[0]["fields"].items():
            other = message["fields"].get(name)
            if other != value:
                raise DifferenceError(
                    f"{name} is {other} on rank {rank} of the group and {value} on rank 0; allowed: the same on all"
                )
    return [message["rows"] for message in found]


def _all_messages(group, message, tensor):
    device = device_for(group, tensor)
    mine = torch.zeros(_BYTES, dtype=torch.uint8)
    mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    mine = mine.to(device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        dist.all_gather(found, mine, group=group)
    except RuntimeError as error:
        raise RuntimeError(f"not all {group.size()} ranks of the group took part: {error}") from error
    texts = torch.stack(found).cpu().numpy()
    return [json.loads(bytes(text).rstrip(b"\0")) for text in texts]


def device_for(group, tensor):
    """Where the messages of a group lie: on the CPU if a backend of the group serves it, for no GPU to wait for."""
    if "cpu" in dist.get_backend_config(group) or not torch.cuda.is_available():
        return torch.device("cpu")
    on_gpu = isinstance(tensor, torch.Tensor) and tensor.is_cuda
    return tensor.device if on_gpu else torch.device("cuda", torch.cuda.current_device())
