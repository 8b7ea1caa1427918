"""The worker's side of a request: from its metadata to kernel block ids."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from nixl_fast.layout import GroupKind
from nixl_fast.plan import BlockIds, expand_groups


class ExpandRule(StrEnum):
    """How many kernel blocks of a remote logical block a request names."""

    FULL = "full"
    """All of them: the rule."""

    LOCAL_WIDTH = "local_width"
    """Models with Mamba groups take only the first ``local_ratio``: what vLLM 0.20 and 0.21 did. It loses data where
    the ratios differ and is here to talk to, and to compare with, those versions."""


class RemoteBlocks(msgspec.Struct, frozen=True):
    """What a request's metadata says about the peer's blocks.

    Args:
        kinds: Kind of each group.
        block_ids: The peer's logical block ids, one list per group.
        local_ratio: Kernel blocks per logical block of this engine.
        remote_ratio: Kernel blocks per logical block of the peer.
    """

    kinds: Sequence[GroupKind]
    block_ids: Sequence[BlockIds]
    local_ratio: int
    remote_ratio: int

    @property
    def has_mamba(self) -> bool:
        """Whether any group holds state slots."""
        return GroupKind.MAMBA in self.kinds

    def kernel_ids(self, rule: ExpandRule = ExpandRule.FULL) -> list[NDArray[np.int32]]:
        """The peer's kernel block ids per group, expanded by the peer's ratio; Mamba groups pass through unchanged.

        Raises:
            BlockIdError: Ids that are no block ids, naming group, position, value and limit.
            GeometryError: A ratio out of range, or LOCAL_WIDTH with a local ratio above the remote one.
        """
        width = self.local_ratio if rule is ExpandRule.LOCAL_WIDTH and self.has_mamba else None
        return expand_groups(self.block_ids, self.kinds, self.remote_ratio, width=width)
