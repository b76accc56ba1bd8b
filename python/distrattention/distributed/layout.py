# SPDX-License-Identifier: Apache-2.0
"""Which rows of a sequence lie on which process.

A sequence of N rows is cut into chunks, one for each rank of the ring, or two where the layout is "zigzag": rank p of P
then has the chunks p and 2P-1-p, so that causal attention gives all ranks the same work. Where heads are exchanged, too
(ulysses.py), the rows of a rank of the ring are cut once more, among the ranks that exchange them.
"""

from typing import NamedTuple

from distrattention import core  # noqa: F401; first, for it says in words what is missing
from distrattention.settings import counted, require_int, require_name

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch.distributed.device_mesh import DeviceMesh  # isort: skip

LAYOUTS = ("contiguous", "zigzag", "ulysses")
DEFAULT_MULTIPLE = 128


class Piece(NamedTuple):
    """Neighbouring rows of one rank: positions in the sequence, and where they lie on the rank."""

    start: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        """Where, on the rank, the piece ends."""
        return self.at + self.stop - self.start


class Pair(NamedTuple):
    """Some of a rank's rows and some keys, of another rank or the same, which they all see, or causally."""

    rows: slice
    keys: slice
    causal: bool
    first_row: int  # positions in the sequence
    first_key: int


class Ranks(NamedTuple):
    """The processes that share a sequence: those of the ring and those that exchange heads, None where this process
    is the only one."""

    ring: dist.ProcessGroup | None
    heads: dist.ProcessGroup | None
    layout: str

    @property
    def rings(self) -> int:
        return size_of(self.ring)

    @property
    def exchanges(self) -> int:
        return size_of(self.heads)


def size_of(group):
    """The number of processes of a group; 1 for None."""
    return 1 if group is None else group.size()


def rank_in(group):
    """This process' rank in the group; 0 for None."""
    return 0 if group is None else group.rank()


def ranks_of(group, layout):
    """The Ranks that a caller names by `group` (a ProcessGroup, a DeviceMesh, or None for all processes)."""
    require_name("layout", layout, LAYOUTS)
    if group is None or isinstance(group, dist.ProcessGroup):
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized; allowed: after init_process_group()")
        groups = [group or dist.group.WORLD]
    elif isinstance(group, DeviceMesh) and group.ndim in (1, 2):
        groups = group.get_all_groups()
    else:
        found = f"a mesh of {group.ndim} axes" if isinstance(group, DeviceMesh) else f"of type {type(group).__name__}"
        raise TypeError(f"group is {found}; allowed: None, a ProcessGroup, or a DeviceMesh of 1 or 2 axes")
    if len(groups) == 2:
        if layout == "ulysses":
            raise ValueError("layout is 'ulysses' with a mesh of 2 axes, whose second one is; allowed: 'contiguous', "
                             "'zigzag', the layouts of the first axis, the ring")  # fmt: skip
        ring, heads = groups
    else:
        ring, heads = (None, groups[0]) if layout == "ulysses" else (groups[0], None)
    ring, heads = (None if group is None or group.size() == 1 else group for group in (ring, heads))
    return Ranks(ring, heads, layout)


def chunk_length(length, chunks, multiple):
    """Rows of all chunks but the last ones, which may be shorter or empty."""
    return -(-length // (chunks * multiple)) * multiple


def cut(length, ranks, layout, multiple):
    """The pieces of each of so many ranks of a ring, of a sequence of so many rows."""
    chunks = 2 * ranks if layout == "zigzag" else ranks
    rows = chunk_length(length, chunks, multiple)
    bounds = [min(n * rows, length) for n in range(chunks + 1)]
    owned = [(p, chunks - 1 - p) if layout == "zigzag" else (p,) for p in range(ranks)]
    return [pieces_of([(bounds[n], bounds[n + 1]) for n in chunks_of]) for chunks_of in owned]


def cut_as_found(rows):
    """The pieces of each rank where each holds so many rows, one rank's behind the other's."""
    starts = [sum(rows[:p]) for p in range(len(rows))]
    return [pieces_of([(start, start + count)]) for start, count in zip(starts, rows)]


def pieces_of(bounds):
    """The pieces of one rank: those that touch are one, and none is empty."""
    found = []
    for start, stop in bounds:
        if found and found[-1].stop == start:
            found[-1] = found[-1]._replace(stop=stop)
        elif start < stop:
            found.append(Piece(start, stop, found[-1].end if found else 0))
    return found


def rows_of(pieces):
    """How many rows the pieces have."""
    return pieces[-1].end if pieces else 0


def pairs_of(rows, keys, causal, fused):
    """The Pairs of pieces of rows and pieces of keys that see each other; `fused`: as few as there can be, where it
    does not matter how far rows and keys lie from each other."""
    if fused and rows and keys and (rows == keys or not causal):  # a causal rank's own pieces are as if they touched
        every = slice(0, rows_of(rows)), slice(0, rows_of(keys))
        return [Pair(*every, causal, rows[0].start, keys[0].start)]
    found = []
    for key in keys:
        seeing = [row for row in rows if not causal or row.start >= key.start]
        if fused and seeing:
            seeing = [seeing[0]._replace(stop=seeing[0].start + seeing[-1].end - seeing[0].at)]
        for row in seeing:
            pair = Pair(slice(row.at, row.end), slice(key.at, key.end), causal and row.start == key.start, row.start,
                        key.start)  # fmt: skip
            if fused and found and found[-1].rows == pair.rows:
                found[-1] = found[-1]._replace(keys=slice(found[-1].keys.start, key.end))
            else:
                found.append(pair)
    return found


def share(rows, parts, part):
    """(first, past the last) of the rows that a part gets where heads are exchanged: the first ones get one more."""
    each, more = divmod(rows, parts)
    first = part * each + min(part, more)
    return first, first + each + (part < more)


def positions(length, *, group=None, layout="contiguous", multiple=DEFAULT_MULTIPLE, device=None):
    """The positions of this process' rows in a sequence of `length` rows, int64 [rows]: what RoPE takes.

    group, layout, multiple: as attention() takes them. Raises as shard().
    """
    ranks = ranks_of(group, layout)
    length, multiple = require_int("length", length, 0), require_int("multiple", multiple, 1)
    pieces = cut(length, ranks.rings, layout, multiple)[rank_in(ranks.ring)]
    found = [torch.arange(piece.start, piece.stop, device=device) for piece in pieces]
    found = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)
    first, last = share(len(found), ranks.exchanges, rank_in(ranks.heads))
    return found[first:last]


def shard(tensor, dim=-2, *, group=None, layout="contiguous", multiple=DEFAULT_MULTIPLE):
    """This process' rows of a tensor that all processes have whole: [..., N, ...] -> [..., its share, ...], a copy.

    dim: the axis of the rows. group, layout, multiple: as attention() takes them. The gradient is that of indexing.
    Raises TypeError and ValueError naming what does not fit.
    """
    length = tensor.shape[dim]
    where = positions(length, group=group, layout=layout, multiple=multiple, device=tensor.device)
    return tensor.index_select(dim, where)


def unshard(tensor, dim=-2, *, group=None, layout="contiguous", multiple=DEFAULT_MULTIPLE):
    """The whole of which each process has what shard() gave it: [..., its share, ...] -> [..., N, ...] on each, without
    gradients. All processes of the group call it. Raises ValueError on each where the shares are not shard()'s.
    """
    ranks = ranks_of(group, layout)
    of_ring, _ = _gathered(tensor.detach().movedim(dim, 0), ranks.heads)
    whole, rows = _gathered(of_ring, ranks.ring)
    pieces = cut(len(whole), ranks.rings, layout, multiple)
    require_shares(rows, pieces, multiple)
    where = [torch.arange(piece.start, piece.stop, device=whole.device) for of_rank in pieces for piece in of_rank]
    result = torch.empty_like(whole)
    if where:
        result[torch.cat(where)] = whole
    return result.movedim(0, dim)


def _gathered(rows, group):
    """(the rows of all ranks, one behind the other; how many each has)."""
    if group is None:
        return rows, [len(rows)]
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.full_like(counts[0], len(rows)), group=group)
    counts = [count.item() for count in counts]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded, group=group)
    return torch.cat([of_rank[:count] for of_rank, count in zip(found, counts)]), counts


def require_shares(rows, pieces, multiple):
    """Raises ValueError unless each rank of the ring has as many rows as its pieces."""
    for rank, (found, of_rank) in enumerate(zip(rows, pieces)):
        if found != rows_of(of_rank):
            raise ValueError(
                f"rank {rank} of the ring has {counted(found, 'row')} of {sum(rows)}; allowed: {rows_of(of_rank)}, by "
                f"chunks of a multiple of {multiple} rows (`multiple`), as shard() cuts them"
            )


def require_chunks(pieces, unit, why):
    """Raises ValueError unless all pieces but the last one of the sequence are multiples of `unit` rows."""
    length = max((piece.stop for of_rank in pieces for piece in of_rank), default=0)
    for rank, of_rank in enumerate(pieces):
        for piece in of_rank:
            if piece.stop < length and piece.stop % unit != 0:
                found = f"rank {rank} of the ring ends after {counted(piece.stop, 'row')} of the sequence"
                raise ValueError(f"{found}; allowed: a multiple of {unit}, {why}, but at the sequence's end")
