"""vLLM's descriptor index spaces: which flat indices a list of kernel block ids has, in vLLM's order.

vLLM numbers the descriptors of one rank region by region, attention first. `IndexSpace` is that numbering as plain
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_fast.errors import BlockIdError

Ids = Sequence[int] | NDArray[np.integer]


class Part(NamedTuple):
    """Groups whose ids are listed together, region by region."""

    groups: tuple[int, ...]
    regions: tuple[int, ...]


class IndexSpace:
    """One side's numbering.

    Args:
        region_blocks: Descriptors of each region, in order; a region's first index is the sum of those before it.
        parts: Which groups are listed in which regions, in the order of the result.
    """

    __slots__ = ("_limits", "_starts", "parts")

    def __init__(self, region_blocks: Sequence[int], parts: Sequence[Part]) -> None:
        starts = list(accumulate(region_blocks, initial=0))
        # Descriptor ids are int32 for NIXL; a list that long is refused by it.
        kind = np.int32 if starts[-1] < 2**31 else np.int64
        self.parts = tuple(parts)
        self._starts = [np.array([starts[region] for region in part.regions], kind)[:, None] for part in parts]
        self._limits = [min((region_blocks[region] for region in part.regions), default=0) for part in parts]

    def count(self, block_ids: Sequence[Ids]) -> int:
        """How many indices `indices` returns for these ids."""
        return sum(len(part.regions) * sum(len(block_ids[group]) for group in part.groups) for part in self.parts)

    def indices(self, block_ids: Sequence[Ids]) -> NDArray[np.integer]:
        """Descriptor indices of kernel block ids.

        Args:
            block_ids: One list of kernel block ids (of state slots, for a Mamba group) per group.

        Returns:
            1-D, C-contiguous, int32: part by part, in a part region by region, in a region in list order.

        Raises:
            BlockIdError: An id that is negative or not below its regions' number of blocks.
        """
        out: list[NDArray[np.integer]] = []
        for part, starts, limit in zip(self.parts, self._starts, self._limits, strict=True):
            listed = [_checked(group, block_ids[group], limit) for group in part.groups if len(block_ids[group])]
            if listed:
                ids = listed[0] if len(listed) == 1 else np.concatenate(listed)
                out.append(np.ravel(starts + ids.astype(starts.dtype, copy=False)))
        if len(out) == 1:
            return out[0]
        return np.concatenate(out) if out else np.empty(0, np.int32)


def _checked(group: int, block_ids: Ids, limit: int) -> NDArray[np.integer]:
    ids = np.asarray(block_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BlockIdError(
            f"kernel block ids of group {group} must be a flat list of integers, got {ids.dtype} of shape {ids.shape}"
        )
    if ids.min() < 0 or ids.max() >= limit:
        at = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
        raise BlockIdError(f"kernel block id {ids[at]} at position {at} of group {group} is not in 0 .. {limit - 1}")
    return ids


class LazyIds:
    """Descriptor indices that are worked out when NIXL needs them, on the thread that needs them.

    Has a length, and turns into an array where one is asked for.
    """

    __slots__ = ("_block_ids", "_count", "_space")

    def __init__(self, space: IndexSpace, block_ids: Sequence[Ids]) -> None:
        self._space = space
        self._block_ids = block_ids
        self._count = space.count(block_ids)

    def __len__(self) -> int:
        return self._count

    def resolve(self) -> NDArray[np.integer]:
        """The indices.

        Raises:
            BlockIdError: As `IndexSpace.indices`.
        """
        return self._space.indices(self._block_ids)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.integer]:
        return np.asarray(self.resolve(), dtype=dtype)  # type: ignore[call-overload, no-any-return]
