"""What one rank has: its KV-cache groups and the registered memory they live in, validated once.

Every class here is frozen and checked when it is made, so that a plan can trust it. Sizes are bytes, block sizes are
tokens, and ``num_blocks`` counts kernel blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Self

import msgspec

from nixl_fast.errors import GeometryError

_MAX_COUNT = 2**31 - 1
_ADDRESS_SPACE = 2**64


class GroupKind(StrEnum):
    """What the blocks of a KV-cache group hold."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"
    MAMBA = "mamba"


class BlockOrder(StrEnum):
    """How the tokens and KV heads of one kernel block follow each other in memory."""

    TOKEN_MAJOR = "token_major"  # noqa: S105
    """All heads of a token, then the next token (NHD)."""

    HEAD_MAJOR = "head_major"
    """All tokens of a head, then the next head (HND)."""


class _Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen record whose fields are normalised (sequences to tuples) and checked in ``__post_init__``."""

    def _int(self, field: str, low: int, high: int) -> int:
        value = getattr(self, field)
        number = as_index(value)
        if number is None or isinstance(value, bool):
            raise GeometryError(f"{type(self).__name__}.{field} must be an integer, got {describe(value)}")
        if not low <= number <= high:
            raise GeometryError(f"{type(self).__name__}.{field} is {describe(number)}, it must be in {low} .. {high}")
        self._set(field, number)
        return number

    def _optional_int(self, field: str, low: int, high: int) -> None:
        if getattr(self, field) is not None:
            self._int(field, low, high)

    def _bool(self, field: str) -> None:
        if not isinstance(value := getattr(self, field), bool):
            raise GeometryError(f"{type(self).__name__}.{field} must be a bool, got {describe(value)}")

    def _tuple(self, field: str, kind: type) -> None:
        value = getattr(self, field)
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise GeometryError(
                f"{type(self).__name__}.{field} must be a sequence of {kind.__name__}, got {describe(value)}"
            )
        items = tuple(value)
        for index, item in enumerate(items):
            if not isinstance(item, kind):
                raise GeometryError(
                    f"{type(self).__name__}.{field}[{index}] must be a {kind.__name__}, got {describe(item)}"
                )
        self._set(field, items)

    def _enum(self, field: str, kind: type[StrEnum]) -> None:
        value = getattr(self, field)
        try:
            self._set(field, kind(value))
        except Exception:  # Enum shows the value in its own error, and a class writes what it likes
            known = ", ".join(kind)
            raise GeometryError(
                f"{type(self).__name__}.{field} is {describe(value)}, it must be one of {known}"
            ) from None

    def _set(self, field: str, value: object) -> None:
        msgspec.structs.force_setattr(self, field, value)


class Group(_Checked, frozen=True):
    """A KV-cache group with its own block table.

    Args:
        kind: What its blocks hold.
        block_size: Tokens per logical block.
        blocks_per_logical: Kernel blocks per logical block (the ratio). For a Mamba group the kernel pages that one
            state slot spans; its ids are never expanded.
        sliding_window: Window in tokens; required for a sliding-window group and meaningless for the others.

    Raises:
        GeometryError: A value out of range, or a block size that its kernel blocks do not divide.
    """

    kind: GroupKind
    block_size: int
    blocks_per_logical: int = 1
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        self._enum("kind", GroupKind)
        size = self._int("block_size", 1, _MAX_COUNT)
        ratio = self._int("blocks_per_logical", 1, _MAX_COUNT)
        self._optional_int("sliding_window", 1, _MAX_COUNT)
        if (self.kind is GroupKind.SLIDING_WINDOW) != (self.sliding_window is not None):
            raise GeometryError(f"Group.sliding_window is {self.sliding_window} for a group of kind {self.kind}")
        if self.kind is not GroupKind.MAMBA and size % ratio:
            raise GeometryError(f"Group.block_size {size} is not a multiple of blocks_per_logical {ratio}")

    @property
    def kernel_block_size(self) -> int:
        """Tokens per kernel block."""
        return self.block_size // self.blocks_per_logical


class Region(_Checked, frozen=True):
    """One registered memory area of evenly spaced kernel blocks.

    Args:
        base_addr: Address of the first byte of kernel block 0.
        block_len: Bytes moved per kernel block.
        num_blocks: Kernel blocks; 0 is allowed and has no descriptor.
        block_stride: Bytes between the starts of consecutive kernel blocks; default ``block_len``.
        groups: Indices of the groups that live here; default: every attention group (in `MambaState`, every Mamba
            group). Groups that share a region share its blocks, so their ids must not collide.
        device_id: Device the memory is on, as NIXL takes it.
        mem_type: ``"DRAM"`` or ``"VRAM"``.
        replicated: Every tensor-parallel rank holds the same bytes. True for a region of MLA groups whatever it says.
        layer: Name of what lives here, unique in its layout (``"model.layers.3.attn.k"``). Regions that are named on
            both sides are matched by name, others by index; pipeline stages need names.
        order: How tokens and heads follow each other in a block. Unset, a block is taken to allow the one cut that a
            plan needs: by heads where tensor parallelism differs, by tokens where kernel blocks differ. A plan that
            needs both cuts of a block of several heads is refused until both sides state their order.

    Raises:
        GeometryError: A value out of range, a stride below the length, or a last byte past 2^64.
    """

    base_addr: int
    block_len: int
    num_blocks: int
    block_stride: int | None = None
    groups: Sequence[int] | None = None
    device_id: int = 0
    mem_type: str = "DRAM"
    replicated: bool = False
    layer: str | None = None
    order: BlockOrder | None = None

    def __post_init__(self) -> None:
        base = self._int("base_addr", 0, _ADDRESS_SPACE - 1)
        length = self._int("block_len", 1, _ADDRESS_SPACE - 1)
        count = self._int("num_blocks", 0, _MAX_COUNT)
        self._optional_int("block_stride", 1, _ADDRESS_SPACE - 1)
        self._int("device_id", 0, _ADDRESS_SPACE - 1)
        self._bool("replicated")
        if self.stride < length:
            raise GeometryError(f"Region.block_stride {self.stride} is smaller than block_len {length}")
        if self.mem_type not in ("DRAM", "VRAM"):
            raise GeometryError(f"Region.mem_type is {describe(self.mem_type)}, it must be 'DRAM' or 'VRAM'")
        if self.end_addr > _ADDRESS_SPACE:
            raise GeometryError(
                f"Region last byte lies past 2^64: base_addr {base}, {count} blocks of {length} bytes, "
                f"{self.stride} bytes apart"
            )
        if self.layer is not None and (not isinstance(self.layer, str) or not _is_text(self.layer)):
            raise GeometryError(f"Region.layer must be a non-empty string or None, got {describe(self.layer)}")
        if self.order is not None:
            self._enum("order", BlockOrder)
        if self.groups is not None:
            self._tuple("groups", int)
            if len(set(self.groups)) != len(self.groups) or not self.groups or True in map(_is_bool, self.groups):
                raise GeometryError(f"Region.groups is {self.groups}, it must name different groups, one or more")
            self._set("groups", tuple(sorted(self.groups)))

    @property
    def stride(self) -> int:
        """Bytes between the starts of consecutive kernel blocks."""
        return self.block_len if self.block_stride is None else self.block_stride

    @property
    def end_addr(self) -> int:
        """Address after the last byte that moves."""
        return (
            self.base_addr + (self.num_blocks - 1) * self.stride + self.block_len if self.num_blocks else self.base_addr
        )

    def title(self, index: int) -> str:
        """What messages call the region with this index."""
        return f"region {index}" + (f" ({self.layer})" if self.layer else "")


def _is_text(name: str) -> bool:
    """Whether a name can be sent: not empty and without lone surrogates."""
    return bool(name) and name == name.encode(errors="replace").decode()


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


class ConvProjection(_Checked, frozen=True):
    """One projection of a Mamba convolution state.

    Args:
        size_bytes: Bytes on this rank.
        sharded: Whether tensor parallelism splits it; B and C of a model with one group are not split.

    Raises:
        GeometryError: A value out of range.
    """

    size_bytes: int
    sharded: bool = True

    def __post_init__(self) -> None:
        self._int("size_bytes", 1, _ADDRESS_SPACE - 1)
        self._bool("sharded")


class MambaState(_Checked, frozen=True):
    """Where and how Mamba state slots lie in memory.

    A slot spans ``blocks_per_logical`` kernel pages and begins with the convolution projections, followed by the
    temporal state.

    Args:
        regions: The memory, one entry per layer; ``block_len``, ``block_stride`` and ``num_blocks`` are kernel pages,
            as of an attention region that shares the memory.
        conv: Projections in memory order: x, B, C for Mamba2 and gated delta nets, one for Mamba1.
        state_bytes: Bytes of the temporal state on this rank.

    Raises:
        GeometryError: A value out of range.
    """

    regions: Sequence[Region]
    conv: Sequence[ConvProjection]
    state_bytes: int

    def __post_init__(self) -> None:
        self._tuple("regions", Region)
        self._tuple("conv", ConvProjection)
        self._int("state_bytes", 1, _ADDRESS_SPACE - 1)
        if not self.regions:
            raise GeometryError("MambaState.regions is empty")

    @property
    def slot_bytes(self) -> int:
        """Bytes moved per slot."""
        return sum(projection.size_bytes for projection in self.conv) + self.state_bytes


Place = tuple[str, Region, tuple[int, ...]]
"""A region with its name and the groups that live in it."""


class EngineLayout(_Checked, frozen=True):
    """Everything a peer has to know about one rank.

    Args:
        engine_id: Name of the engine, unique among its peers.
        groups: KV-cache groups; a request lists block ids in this order.
        regions: Memory of the attention groups, in descriptor order.
        mamba: Memory of the Mamba groups, if there are any.
        tp_rank: This rank among ``tp_size`` tensor-parallel ranks.
        tp_size: Number of tensor-parallel ranks.
        num_kv_heads: KV heads of the whole model, before tensor parallelism.
        null_block_id: Placeholder id that some engines put where a sequence has no block; never transferred.
        generation: Number of the registration; a higher one makes plans of the lower ones stale.
        dcp_size: Decode context parallelism: block ``i`` of a sequence is on the ranks with ``tp_rank % dcp_size`` equal
            to ``i % dcp_size``, as their block ``i // dcp_size``. Divides ``tp_size``.
        pp_rank: This pipeline stage among ``pp_size``.
        pp_size: Number of pipeline stages; above 1 every region needs a ``layer``.

    Raises:
        GeometryError: A value out of range, a group that lives nowhere, a block count that a ratio does not divide, a
            state slot larger than its pages, or two regions of one group that overlap.
    """

    engine_id: str
    groups: Sequence[Group]
    regions: Sequence[Region]
    mamba: MambaState | None = None
    tp_rank: int = 0
    tp_size: int = 1
    num_kv_heads: int = 1
    null_block_id: int | None = None
    generation: int = 0
    dcp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.engine_id, str) or not _is_text(self.engine_id):
            raise GeometryError(f"EngineLayout.engine_id must be a non-empty string, got {describe(self.engine_id)}")
        self._tuple("groups", Group)
        self._tuple("regions", Region)
        size = self._int("tp_size", 1, _MAX_COUNT)
        self._int("tp_rank", 0, size - 1)
        self._int("num_kv_heads", 1, _MAX_COUNT)
        self._optional_int("null_block_id", 0, _MAX_COUNT)
        self._int("generation", 0, _ADDRESS_SPACE - 1)
        if size % self._int("dcp_size", 1, _MAX_COUNT):
            raise GeometryError(f"EngineLayout.tp_size {size} is not a multiple of dcp_size {self.dcp_size}")
        self._int("pp_rank", 0, self._int("pp_size", 1, _MAX_COUNT) - 1)
        if not self.groups:
            raise GeometryError("EngineLayout.groups is empty")
        if self.mamba is not None and not isinstance(self.mamba, MambaState):
            raise GeometryError(f"EngineLayout.mamba must be a MambaState or None, got {describe(self.mamba)}")
        self._check_residence()
        self._check_slots()
        self._check_overlap()

    @property
    def dcp_rank(self) -> int:
        """This rank among ``dcp_size`` context-parallel ranks."""
        return self.tp_rank % self.dcp_size

    def is_mamba(self, group: int) -> bool:
        """Whether a group holds state slots rather than tokens."""
        return self.groups[group].kind is GroupKind.MAMBA

    def residents(self, region: Region, *, mamba: bool = False) -> tuple[int, ...]:
        """Indices of the groups that live in a region of ``regions`` (or, with ``mamba``, of ``mamba.regions``)."""
        if region.groups is not None:
            return tuple(region.groups)
        return tuple(index for index in range(len(self.groups)) if self.is_mamba(index) == mamba)

    def places(self) -> Iterator[Place]:
        """Every region with its name and the groups that live in it, attention first."""
        for index, region in enumerate(self.regions):
            yield region.title(index), region, self.residents(region)
        for index, region in enumerate(self.mamba.regions if self.mamba else ()):
            yield f"mamba {region.title(index)}", region, self.residents(region, mamba=True)

    def is_replicated(self, region: Region) -> bool:
        """Whether every tensor-parallel rank holds the same bytes of a region of ``regions``."""
        return region.replicated or all(self.groups[group].kind is GroupKind.MLA for group in self.residents(region))

    def num_blocks(self, group: int) -> int:
        """Logical blocks of a group; every id is below it."""
        ratio = self.groups[group].blocks_per_logical
        return min(region.num_blocks // ratio for _, region, groups in self.places() if group in groups)

    def to_bytes(self) -> bytes:
        """The layout as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | str) -> Self:
        """Reads and validates what `to_bytes` wrote.

        Raises:
            GeometryError: Not JSON, an unknown or missing field, or anything the constructors refuse.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise GeometryError(f"not a layout: {error}") from None

    def _check_residence(self) -> None:
        housed: set[int] = set()
        for name, region, groups in self.places():
            mamba = name.startswith("mamba")
            for group in groups:
                if not 0 <= group < len(self.groups):
                    raise GeometryError(f"{name}: group {group} is not below {len(self.groups)}")
                if self.is_mamba(group) != mamba:
                    where = "MambaState.regions" if self.is_mamba(group) else "EngineLayout.regions"
                    raise GeometryError(f"{name}: group {group} is {self.groups[group].kind}, it belongs in {where}")
                ratio = self.groups[group].blocks_per_logical
                if region.num_blocks % ratio:
                    raise GeometryError(
                        f"{name}: {region.num_blocks} kernel blocks are not a multiple of the {ratio} blocks per "
                        f"logical block of group {group}"
                    )
            housed.update(groups)
        for group in range(len(self.groups)):
            if group not in housed:
                raise GeometryError(f"group {group} ({self.groups[group].kind}) lives in no region")
        for names in ([r.layer for r in self.regions], [r.layer for r in self.mamba.regions] if self.mamba else []):
            named = [name for name in names if name is not None]
            if len(set(named)) != len(named):
                raise GeometryError(f"layer {max(named, key=named.count)!r} names two regions")
            if self.pp_size > 1 and len(named) != len(names):
                raise GeometryError("a layout of several pipeline stages needs a layer name for every region")
            if named and len(named) != len(names):
                raise GeometryError(f"layer names {len(named)} of {len(names)} regions; name all of them or none")
        if self.mamba is not None and not any(map(self.is_mamba, range(len(self.groups)))):
            raise GeometryError("EngineLayout.mamba is given but no group is of kind mamba")

    def _check_slots(self) -> None:
        if self.mamba is None:
            return
        for index, region in enumerate(self.mamba.regions):
            for group in self.residents(region, mamba=True):
                ratio = self.groups[group].blocks_per_logical
                room = (ratio - 1) * region.stride + region.block_len
                if self.mamba.slot_bytes > room:
                    raise GeometryError(
                        f"mamba region {index}: a state slot of {self.mamba.slot_bytes} bytes does not fit the {room} "
                        f"bytes of its {ratio} kernel pages"
                    )

    def _check_overlap(self) -> None:
        for (name, region, groups), (other_name, other, other_groups) in self.overlapping():
            if shared := set(groups) & set(other_groups):
                raise GeometryError(f"{name} and {other_name} overlap and both hold blocks of group {min(shared)}")
            if not _same_pages(region, other):
                raise GeometryError(
                    f"{name} and {other_name} overlap but do not have their pages in common (base {region.base_addr:#x} "
                    f"stride {region.stride}, base {other.base_addr:#x} stride {other.stride}); groups can share memory "
                    "only page by page"
                )

    def overlapping(self) -> Iterator[tuple[Place, Place]]:
        """Pairs of regions whose blocks or state slots share bytes."""
        places = sorted(
            (place for place in self.places() if place[1].num_blocks),
            key=lambda place: (place[1].mem_type, place[1].device_id, place[1].base_addr),
        )
        for index, place in enumerate(places):
            region = place[1]
            for other in places[index + 1 :]:
                where = (other[1].mem_type, other[1].device_id)
                if where != (region.mem_type, region.device_id) or other[1].base_addr >= region.end_addr:
                    break
                if self._share_bytes(place, other):
                    yield place, other

    def _share_bytes(self, place: Place, later: Place) -> bool:
        """Whether two regions share bytes, of which the later one starts within the other's extent."""
        stride = place[1].stride
        if later[1].stride != stride:
            return True  # not decided block by block: nobody lays memory out like that on purpose
        offset = (later[1].base_addr - place[1].base_addr) % stride
        return offset < self._page_bytes(place) or stride - offset < self._page_bytes(later)

    def _page_bytes(self, place: Place) -> int:
        """Bytes of each page that are used; a state slot of several pages also fills the gaps between them."""
        name, region, _ = place
        if self.mamba is None or not name.startswith("mamba"):
            return region.block_len
        return self.mamba.slot_bytes if self.mamba.slot_bytes <= region.block_len else region.stride


def _same_pages(first: Region, second: Region) -> bool:
    """Whether page ``i`` of one lies within page ``i`` of the other, gaps included."""
    offset = abs(first.base_addr - second.base_addr)
    later = first if first.base_addr > second.base_addr else second
    return first.stride == second.stride and offset + later.block_len <= first.stride


def as_index(value: Any) -> int | None:
    """An integer of any type as an int, of no subclass; None if it is none."""
    try:
        return int.__index__(operator.index(value))
    except Exception:  # of a class that says it is an integer and is none
        return None


def describe(value: Any) -> str:
    """A field's value as error messages show it; Python writes no int that is very long, and a class writes what it likes."""
    try:
        return str(value) if isinstance(value, StrEnum) else repr(value)
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be shown"
