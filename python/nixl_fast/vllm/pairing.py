"""Which kernel blocks of one request belong together, by token position; numbers only, nothing of vLLM.

A `GroupRule` is what two ranks know of one KV-cache group, from the handshake on; `GroupPlan.pair` is one native call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_fast.errors import PairingError
from nixl_fast.layout import ConvProjection, EngineLayout, Group, GroupKind, MambaState, Region
from nixl_fast.plan import Direction, TransferPlan

Ids = Sequence[int] | NDArray[np.integer]


class SideRule(NamedTuple):
    """One side of a group.

    Args:
        kernel_tokens: Tokens per kernel block; ignored for a Mamba group.
        ratio: Kernel blocks per logical block.
        num_blocks: Logical blocks.
    """

    kernel_tokens: int
    ratio: int
    num_blocks: int


class GroupRule(NamedTuple):
    """Both sides of a group.

    Args:
        kind: What its blocks hold.
        window: Tokens of the sliding window, for a sliding-window group.
        direction: READ if the local side is the consumer.
        local: This rank.
        remote: The peer.
        null_block: Id that stands for "no block", if there is one.
    """

    kind: GroupKind
    window: int | None
    direction: Direction
    local: SideRule
    remote: SideRule
    null_block: int | None = None

    @property
    def unit_tokens(self) -> int:
        """Tokens per unit, the greatest common divisor of both kernel blocks; 0 for state slots."""
        return 0 if self.kind is GroupKind.MAMBA else math.gcd(self.local.kernel_tokens, self.remote.kernel_tokens)

    def units(self, side: SideRule) -> int:
        """Units per logical block of one side."""
        return 1 if self.kind is GroupKind.MAMBA else side.kernel_tokens // self.unit_tokens * side.ratio


class GroupPairs(NamedTuple):
    """What one group moves: units of `GroupRule.unit_tokens`, paired element by element."""

    local: NDArray[np.int32]
    remote: NDArray[np.int32]
    unmoved: NDArray[np.int32]
    """Consumer units that are listed and get no data."""


class GroupPlan:
    """A `GroupRule` made ready; one per peer and group.

    Raises:
        GeometryError: Blocks that cannot be laid side by side.
    """

    __slots__ = ("_plan", "_producer_tokens", "_reads", "rule", "units")

    def __init__(self, rule: GroupRule) -> None:
        self.rule = rule
        self.units = rule.units(rule.local), rule.units(rule.remote)
        """Units per logical block of the local and the remote side."""
        self._reads = rule.direction is Direction.READ
        producer = rule.remote if self._reads else rule.local
        self._producer_tokens = producer.kernel_tokens * producer.ratio
        self._plan = TransferPlan(_layout(rule, rule.local), _layout(rule, rule.remote), direction=rule.direction)

    def pair(
        self,
        local_ids: Ids,
        remote_ids: Ids,
        *,
        num_tokens: int | None = None,
        consumer_first: int | None = None,
        producer_first: int | None = None,
    ) -> GroupPairs:
        """Pairs one request's logical blocks.

        Args:
            local_ids: This rank's logical block ids.
            remote_ids: The peer's.
            num_tokens: Tokens whose KV the consumer wants and the producer holds.
            consumer_first: Index, in the sequence, of the consumer's first listed block; None if unknown.
            producer_first: The same of the producer; None if its list is known to end with the last token's block.

        Returns:
            The paired units and the consumer's units that get no data.

        Raises:
            BlockIdError: An id that is out of range or that the consumer lists twice.
            PairingError: Positions that contradict each other or are not certain.
        """
        if num_tokens is not None and producer_first is not None and self.rule.kind is GroupKind.SLIDING_WINDOW:
            # Blocks past the last token (lookahead) follow the window; without them the list ends where it should.
            ids = remote_ids if self._reads else local_ids
            surplus = producer_first + len(ids) - -(-num_tokens // self._producer_tokens)
            if surplus < 0:
                raise PairingError(
                    f"producer lists {len(ids)} blocks from block {producer_first} on, {num_tokens} tokens need "
                    f"{-surplus} more"
                )
            if surplus > len(ids):
                raise PairingError(
                    f"producer lists blocks from block {producer_first} on, the consumer wants {num_tokens} tokens, which end "
                    f"{surplus - len(ids)} blocks before that"
                )
            ids = ids[: len(ids) - surplus]
            local_ids, remote_ids = (local_ids, ids) if self._reads else (ids, remote_ids)
        computed = None if consumer_first is None else [consumer_first]
        pairing = self._plan.pair([local_ids], [remote_ids], num_tokens=num_tokens, num_computed_blocks=computed)
        remote, local = pairing.kernel_pairs(0)
        return GroupPairs(local, remote, pairing.untransferred(0))


def _layout(rule: GroupRule, side: SideRule) -> EngineLayout:
    """One region at an address that does not matter, one byte per token."""
    if rule.kind is GroupKind.MAMBA:
        state = MambaState((Region(0, 2, side.num_blocks),), (ConvProjection(1),), 1)
        return EngineLayout("vllm", (Group(rule.kind, 1),), (), mamba=state, null_block_id=rule.null_block)
    group = Group(rule.kind, side.kernel_tokens * side.ratio, side.ratio, rule.window)
    region = Region(0, side.kernel_tokens, side.num_blocks * side.ratio)
    return EngineLayout("vllm", (group,), (region,), null_block_id=rule.null_block)
