"""Checked, native KV-cache block pairing for disaggregated LLM serving with NIXL.

A `TransferPlan` is made once per peer from the layouts of two ranks; ``plan.pair(...)`` turns one request's logical
block ids into the two index arrays that ``nixl_agent.make_prepped_xfer`` takes, or refuses with a typed error.
"""

from nixl_fast._native import Pairing
from nixl_fast.errors import (
    BlockIdError,
    GeometryError,
    NixlFastError,
    PairingError,
    StalePlanError,
    TransferError,
)
from nixl_fast.layout import BlockOrder, ConvProjection, EngineLayout, Group, GroupKind, MambaState, Region
from nixl_fast.plan import (
    Direction,
    Lane,
    PeerPlans,
    Side,
    TransferPlan,
    expand_block_ids,
    expand_groups,
    plan_peer,
)

__all__ = [
    "BlockIdError",
    "BlockOrder",
    "ConvProjection",
    "Direction",
    "EngineLayout",
    "GeometryError",
    "Group",
    "GroupKind",
    "Lane",
    "MambaState",
    "NixlFastError",
    "Pairing",
    "PairingError",
    "PeerPlans",
    "Region",
    "Side",
    "StalePlanError",
    "TransferError",
    "TransferPlan",
    "expand_block_ids",
    "expand_groups",
    "plan_peer",
]
