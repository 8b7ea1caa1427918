"""What is refused: each error names the place, the value and the limit, and nothing has been produced or changed."""

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import nixl_fast
from nixl_fast import (
    BlockIdError,
    ConvProjection,
    EngineLayout,
    GeometryError,
    Group,
    GroupKind,
    MambaState,
    NixlFastError,
    PairingError,
    Region,
    TransferPlan,
    expand_block_ids,
    expand_groups,
)

FULL, WINDOW, MAMBA = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.MAMBA
GROUP = Group(FULL, 128, 2)


REGION = Region(0x1000, 64, 3636)


def engine(groups: Any = (GROUP,), regions: Any = (REGION,), **fields: Any) -> EngineLayout:
    return EngineLayout("engine", groups, regions, **fields)


PLAN = TransferPlan(engine(), engine())
TWO = engine(
    (Group(FULL, 16), Group(FULL, 16), Group(MAMBA, 16)),
    (Region(0x1000, 64, 10, groups=(0, 1)),),
    mamba=MambaState((Region(0x100000, 64, 10),), (), 64),
)
PLAN_TWO = TransferPlan(TWO, TWO)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        pytest.param([5, 1818], ["1818", "position 1", "group 0", "1818"], id="P04-id-equal-to-the-limit"),
        pytest.param([5, 2**31], ["2147483648", "position 1", "1818"], id="int32-overflow"),
        pytest.param([5, 2**32 + 1], ["4294967297", "position 1", "1818"], id="uint32-wrap"),
        pytest.param([5, 2**64 + 5], ["18446744073709551621", "position 1", "1818"], id="uint64-wrap"),
        pytest.param([1, 2, -1], ["-1", "position 2", "group 0", "negative", "1818"], id="negative"),
        pytest.param([1, -(2**70)], ["-1180591620717411303424", "position 1", "negative"], id="very-negative"),
        pytest.param([True], ["position 0", "True", "bool", "1818"], id="bool"),
        pytest.param([np.True_], ["position 0", "bool"], id="numpy-bool"),
        pytest.param([1.0], ["position 0", "1.0", "float", "1818"], id="float"),
        pytest.param([np.float32(1)], ["position 0", "float32"], id="numpy-float"),
        pytest.param([1, None], ["position 1", "None"], id="none"),
        pytest.param(["1"], ["position 0", "'1'", "str"], id="str-in-list"),
        pytest.param([[1]], ["position 0", "list"], id="nested"),
        pytest.param("12", ["group 0", "str"], id="str"),
        pytest.param(b"12", ["group 0", "bytes"], id="bytes"),
        pytest.param({1, 2}, ["group 0", "set"], id="set"),
        pytest.param({1: 2}, ["group 0", "dict"], id="dict"),
        pytest.param(range(3), ["group 0", "range"], id="range"),
        pytest.param(None, ["group 0", "NoneType"], id="no-list"),
        pytest.param(7, ["group 0", "int"], id="scalar"),
        pytest.param(np.array([[1, 2]]), ["group 0", "1-D", "[1, 2]"], id="2-D"),
        pytest.param(np.array(1), ["group 0", "1-D"], id="0-D"),
        pytest.param(np.array([1.0]), ["group 0", "float64"], id="float-array"),
        pytest.param(np.array([True]), ["group 0", "bool"], id="bool-array"),
        pytest.param(np.array([1], dtype=">i4"), ["group 0", ">i4"], id="foreign-byte-order"),
        pytest.param(np.array([1], dtype=object), ["group 0", "object"], id="object-array"),
        pytest.param(np.array([4, -1], dtype=np.int8), ["-1", "position 1", "negative", "1818"], id="int8-negative"),
        pytest.param(np.array([4, 2**32 + 1]), ["4294967297", "position 1", "1818"], id="int64-wrap"),
        pytest.param(np.array([2**64 - 1], dtype=np.uint64), ["18446744073709551615", "position 0"], id="uint64-max"),
    ],
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_ids(ids: Any, words: list[str], side: str) -> None:
    sides = {"local": [[1]], "remote": [[1]], side: [ids]}
    with pytest.raises(BlockIdError) as refused:
        PLAN.pair(sides["local"], sides["remote"])
    assert side in str(refused.value)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("local", "remote", "words"),
    [
        pytest.param([[1], [2]], [[1]], ["local", "2 groups", "plan has 1"], id="too-many-groups"),
        pytest.param([[1]], [], ["remote", "0 groups", "plan has 1"], id="too-few-groups"),
        pytest.param([1], [[1]], ["local group 0", "int"], id="flat-list"),
        pytest.param(np.array([[1]]), [[1]], ["local", "ndarray"], id="matrix"),
        pytest.param([[1]], "1", ["remote", "str"], id="str"),
        pytest.param(None, [[1]], ["local", "NoneType"], id="none"),
        pytest.param([[4, 5, 4]], [[1, 2, 3]], ["4", "position 2", "local group 0", "position 0"], id="listed-twice"),
    ],
)
def test_lists(local: Any, remote: Any, words: list[str]) -> None:
    with pytest.raises(BlockIdError) as refused:
        PLAN.pair(local, remote)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_one_block_with_two_owners_is_refused_across_groups_that_share_memory() -> None:
    with pytest.raises(
        BlockIdError, match="block id 3 at position 1 of local group 1 was already at position 0 of group 0"
    ):
        PLAN_TWO.pair([[3], [2, 3], [3]], [[0], [1, 2], [3]])
    assert PLAN_TWO.pair([[3], [2, 4], [3]], [[0], [1, 2], [3]]).num_descs == 4


def test_state_slots_and_kernel_blocks_of_one_page_collide() -> None:
    shared = Region(0x1000, 64, 12)
    layout = engine((Group(FULL, 32, 2), Group(MAMBA, 1, 3)), (shared,), mamba=MambaState((shared,), (), 192))
    plan = TransferPlan(layout, layout)
    # Slot 1 spans kernel pages 3, 4, 5; logical block 2 spans 4 and 5, logical block 3 spans 6 and 7.
    with pytest.raises(
        BlockIdError, match="block id 1 at position 0 of local group 1 was already at position 0 of group 0"
    ):
        plan.pair([[2], [1]], [[0], [1]])
    assert plan.pair([[3], [1]], [[0], [1]]).num_bytes == 2 * 64 + 192


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"num_tokens": -1}, ["num_tokens", "-1"], id="negative-tokens"),
        pytest.param({"num_tokens": True}, ["num_tokens", "True"], id="bool-tokens"),
        pytest.param({"num_tokens": 1.5}, ["num_tokens", "1.5"], id="float-tokens"),
        pytest.param({"num_tokens": 2**64}, ["num_tokens", str(2**64)], id="huge-tokens"),
        pytest.param({"num_tokens": 2**63, "num_computed_blocks": [0]}, ["num_tokens", "2^48"], id="large-tokens"),
        pytest.param({"num_tokens": 2**48, "num_computed_blocks": [0]}, ["below 2^48"], id="tokens-of-the-limit"),
        pytest.param({"num_computed_blocks": [-1]}, ["num_computed_blocks[0]", "-1"], id="negative-computed"),
        pytest.param({"num_computed_blocks": [2**32]}, ["num_computed_blocks[0]", "2^32"], id="huge-computed"),
        pytest.param({"num_computed_blocks": [0.0]}, ["num_computed_blocks[0]", "float"], id="float-computed"),
        pytest.param({"num_computed_blocks": [0, 0]}, ["2 entries", "1 groups"], id="computed-of-two-groups"),
        pytest.param({"num_computed_blocks": 0}, ["num_computed_blocks", "int"], id="computed-scalar"),
        pytest.param({"num_tokens": 128, "num_computed_blocks": [2**32 - 1]}, [], id="consumer-past-the-data"),
    ],
)
def test_positions(fields: dict[str, Any], words: list[str]) -> None:
    if not words:  # legal: everything listed lies past the data
        assert PLAN.pair([[1]], [[1]], **fields).untransferred(0).tolist() == [2, 3]
        return
    with pytest.raises(PairingError) as refused:
        PLAN.pair([[1]], [[1]], **fields)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_expanded_ids_end_below_2_to_the_31() -> None:
    assert expand_block_ids([2**29 - 1], 4).tolist() == list(range(2**31 - 4, 2**31))
    with pytest.raises(BlockIdError, match=f"{2**29} at position 0 .* not below {2**29}"):
        expand_block_ids([2**29], 4)


def test_ids_between_the_blocks_and_a_placeholder_past_them_name_nothing() -> None:
    layout = engine((Group(FULL, 16),), (Region(0, 64, 8),), null_block_id=100)
    with pytest.raises(BlockIdError, match="50 at position 0 of local group 0 is not below 8"):
        TransferPlan(layout, layout).pair([[50]], [[1]])


def test_windows_that_differ_are_refused() -> None:
    local, remote = (engine((Group(WINDOW, 16, 1, window),), (Region(0, 64, 8),)) for window in (32, 48))
    with pytest.raises(GeometryError, match=r"groups\[0\].sliding_window: local 32, remote 48"):
        TransferPlan(local, remote)


def test_positions_end_below_2_to_the_48() -> None:
    size = 2**17
    plan = TransferPlan(*[engine((Group(FULL, size),), (Region(0, size, 4),))] * 2)
    assert plan.pair([[1]], [[1]], num_tokens=size, num_computed_blocks=[2**31 - 1]).untransferred(0).tolist() == [1]
    with pytest.raises(PairingError, match=f"token {2**48}, it must be below 2\\^48"):
        plan.pair([[1]], [[1]], num_tokens=size, num_computed_blocks=[2**31])
    with pytest.raises(PairingError, match="need 2147483648"):
        plan.pair([[1]], [[1]], num_tokens=2**48 - 1, num_computed_blocks=[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: expand_block_ids([1], 0), ["ratio", "0"], id="ratio-0"),
        pytest.param(lambda: expand_block_ids([1], True), ["ratio", "True"], id="ratio-bool"),
        pytest.param(lambda: expand_block_ids([1], 2.0), ["ratio", "2.0"], id="ratio-float"),  # type: ignore[arg-type]
        pytest.param(lambda: expand_block_ids([1], 2**31), ["ratio"], id="ratio-huge"),
        pytest.param(lambda: expand_block_ids([1], 2, width=0), ["width", "0"], id="width-0"),
        pytest.param(lambda: expand_block_ids([1], 2, width=3), ["width is 3", "ratio 2"], id="width-above-ratio"),
        pytest.param(lambda: expand_groups([[1]], ["conv"], 2), ["kinds[0]", "conv"], id="unknown-kind"),  # type: ignore[list-item]
        pytest.param(lambda: expand_groups([[1]], [FULL], [1, 2]), ["ratio", "2 entries", "1 groups"], id="ratios"),
        pytest.param(lambda: Group("conv", 16), ["conv", "mamba"], id="P22-unknown-kind"),  # type: ignore[arg-type]
        pytest.param(lambda: Group(FULL, 0), ["block_size", "0"], id="block-size-0"),
        pytest.param(lambda: Group(FULL, 16, 0), ["blocks_per_logical", "0"], id="group-ratio-0"),
        pytest.param(lambda: Group(FULL, 16, 3), ["16", "3"], id="group-ratio-does-not-divide"),
        pytest.param(lambda: Group(FULL, 16, sliding_window=4), ["sliding_window", "4"], id="window-of-full"),
        pytest.param(lambda: Group(WINDOW, 16), ["sliding_window", "None"], id="window-missing"),
        pytest.param(lambda: Group(FULL, True), ["block_size", "True"], id="block-size-bool"),
        pytest.param(lambda: Region(0, 0, 1), ["block_len", "0"], id="empty-region"),
        pytest.param(lambda: Region(0, 16, -1), ["num_blocks", "-1"], id="negative-blocks"),
        pytest.param(lambda: Region(0, 16, 2**31), ["num_blocks", str(2**31)], id="too-many-blocks"),
        pytest.param(lambda: Region(-1, 16, 1), ["base_addr", "-1"], id="negative-base"),
        pytest.param(lambda: Region(0, 16, 4, 15), ["15", "16"], id="stride-below-length"),
        pytest.param(lambda: Region(2**64 - 64, 16, 5), ["2^64"], id="address-overflow"),
        pytest.param(lambda: Region(0, 16, 1, mem_type="HBM"), ["mem_type", "HBM"], id="mem-type"),
        pytest.param(lambda: Region(0, 16, 1, groups=()), ["groups"], id="region-without-groups"),
        pytest.param(lambda: Region(0, 16, 1, groups=(0, 0)), ["groups", "(0, 0)"], id="region-group-twice"),
        pytest.param(lambda: Region(0, 16, 1, replicated=1), ["replicated", "1"], id="replicated-int"),  # type: ignore[arg-type]
        pytest.param(lambda: MambaState((), (), 4), ["regions"], id="mamba-without-regions"),
        pytest.param(
            lambda: MambaState((Region(0, 16, 1),), (ConvProjection(4),), 0), ["state_bytes", "0"], id="no-state"
        ),
        pytest.param(lambda: engine(()), ["groups"], id="no-groups"),
        pytest.param(
            lambda: engine((GROUP, GROUP), (Region(0, 16, 2, groups=(0,)),)), ["group 1", "no region"], id="homeless"
        ),
        pytest.param(
            lambda: engine((GROUP,), (Region(0, 16, 2, groups=(1,)),)), ["region 0", "group 1"], id="no-such-group"
        ),
        pytest.param(lambda: engine((GROUP,), (Region(0, 16, 1001),)), ["1001", "2"], id="P09-blocks-not-a-multiple"),
        pytest.param(
            lambda: engine((Group(MAMBA, 16, 10),), (), mamba=MambaState((Region(0, 16, 1001),), (), 16)),
            ["1001", "10"],
            id="P09-mamba-blocks-not-a-multiple",
        ),
        pytest.param(
            lambda: engine((Group(MAMBA, 16),), (Region(0, 16, 2, groups=(0,)),)), ["mamba"], id="mamba-in-regions"
        ),
        pytest.param(
            lambda: engine(
                (Group(MAMBA, 16, 2),), (), mamba=MambaState((Region(0, 16, 4),), (ConvProjection(17),), 16)
            ),
            ["33", "32"],
            id="slot-larger-than-its-pages",
        ),
        pytest.param(lambda: engine(mamba=MambaState((Region(0, 16, 1),), (), 4)), ["mamba"], id="state-without-group"),
        pytest.param(
            lambda: engine(regions=(Region(0, 64, 4), Region(32, 64, 4))), ["region 0", "region 1"], id="overlap"
        ),
        pytest.param(
            lambda: engine((GROUP, GROUP), (Region(0, 4, 8, groups=(0,)), Region(0, 4, 8, 8, groups=(1,)))),
            ["region 0", "region 1", "pages in common"],
            id="groups-share-bytes-but-not-pages",
        ),
        pytest.param(
            lambda: engine(
                (Group(MAMBA, 16, 2),), (), mamba=MambaState((Region(0, 16, 4, 32), Region(16, 16, 4, 32)), (), 40)
            ),
            ["mamba region 0", "mamba region 1", "group 0"],
            id="slots-in-each-other-s-gaps",
        ),
        pytest.param(
            lambda: engine(regions=(Region(0, 64, 2, layer="a"), Region(999, 64, 2))),
            ["1 of 2 regions"],
            id="half-named",
        ),
        pytest.param(
            lambda: TransferPlan(*(engine(regions=(Region(0, 2**63, 2),)),) * 2),
            ["region 0", str(2**64), "2^64"],
            id="logical-block-of-2^64-bytes",
        ),
        pytest.param(
            lambda: TransferPlan(*(engine(regions=(Region(0, 2**62, 2), Region(2**62 * 2, 2**62, 2))),) * 2),
            ["bytes of the local list"],
            id="more-bytes-than-addresses",
        ),
        pytest.param(
            lambda: expand_block_ids([0] * 10, 2**31 - 1), ["number of expanded ids", "2^31"], id="expanded-too-far"
        ),
        pytest.param(lambda: TransferPlan(1, engine()), ["local", "EngineLayout"], id="no-layout"),  # type: ignore[arg-type]
        pytest.param(lambda: engine(tp_rank=2, tp_size=2), ["tp_rank", "2"], id="tp-rank"),
        pytest.param(lambda: engine(null_block_id=-1), ["null_block_id", "-1"], id="null-negative"),
        pytest.param(lambda: EngineLayout("", (GROUP,), (Region(0, 16, 2),)), ["engine_id"], id="engine-id"),
        pytest.param(
            lambda: TransferPlan(
                *(engine((Group(FULL, 16),), tuple(Region(i << 40, 1, 2**30) for i in range(3))),) * 2
            ),
            [str(3 * 2**30), str(2**31)],
            id="too-many-descriptors",
        ),
    ],
)
def test_geometry(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(GeometryError) as refused:
        make()
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("remote", "words"),
    [
        pytest.param(engine((GROUP, GROUP)), ["number of groups", "local 1", "remote 2"], id="groups"),
        pytest.param(engine((Group(GroupKind.MLA, 128, 2),)), ["groups[0].kind", "full_attention", "mla"], id="kind"),
        pytest.param(
            engine(regions=(Region(0, 64, 4), Region(0x1000, 64, 4))), ["number of regions", "1", "2"], id="regions"
        ),
        pytest.param(engine(regions=(Region(0, 32, 4),)), ["region 0", "local 64", "remote 32"], id="P21-length"),
        pytest.param(engine((Group(FULL, 256, 2),)), ["region 0", "local 64", "remote 32"], id="length-per-unit"),
        pytest.param(engine((Group(FULL, 384, 2),)), ["region 0", "64", "3"], id="length-not-divisible"),
        pytest.param(engine((Group(FULL, 4095),)), ["4095", "64", "256"], id="split-limit"),
        pytest.param(
            engine((Group(FULL, 32),), (Region(0, 32, 2**23 + 1, 40),)),
            ["rows of the remote table", "8388609"],
            id="too-many-rows",
        ),
        pytest.param(engine(num_kv_heads=2), ["num_kv_heads", "local 1", "remote 2"], id="P49-one-field-differs"),
    ],
)
def test_pairs_of_layouts(remote: EngineLayout, words: list[str]) -> None:
    local = engine((Group(FULL, 16),), (Region(0, 16, 4),)) if remote.groups[0].block_size == 32 else engine()
    with pytest.raises(GeometryError) as refused:
        TransferPlan(local, remote)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_p21_state_sizes() -> None:
    def hybrid(size: int) -> EngineLayout:
        return engine((Group(MAMBA, 16),), (), mamba=MambaState((Region(0x1000, 4096, 4),), (), size))

    assert TransferPlan(hybrid(2000), hybrid(2000)).local_table.tolist() == [[0x1000, 2000, 0, 4096, 4]]
    with pytest.raises(GeometryError, match=r"mamba state of every region: local 4000 bytes .* remote 2000"):
        TransferPlan(hybrid(4000), hybrid(2000))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="not-utf8"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"{}", id="missing-fields"),
        pytest.param(engine().to_bytes().replace(b'"tp_rank"', b'"tp_rnk"'), id="unknown-field"),
        pytest.param(engine().to_bytes().replace(b'"tp_size":1', b'"tp_size":0'), id="bad-value"),
        pytest.param(engine().to_bytes().replace(b'"tp_size":1', b'"tp_size":1.5'), id="float"),
        pytest.param(engine().to_bytes().replace(b'"num_blocks":3636', b'"num_blocks":true'), id="bool"),
        pytest.param(engine().to_bytes().replace(b'"base_addr":4096', b'"base_addr":18446744073709551616'), id="huge"),
        pytest.param(engine().to_bytes()[:-1], id="truncated"),
    ],
)
def test_bytes_that_are_no_layout(data: bytes) -> None:
    with pytest.raises(GeometryError):
        EngineLayout.from_bytes(data)


def test_a_layout_survives_the_wire() -> None:
    layout = engine((Group(FULL, 32, 2), Group(WINDOW, 32, 2, 64)), (Region(2**64 - 512, 64, 8),), null_block_id=0)
    assert EngineLayout.from_bytes(layout.to_bytes()) == layout
    with pytest.raises(GeometryError):  # replacing a field checks it again
        msgspec.structs.replace(layout, tp_size=0)


def test_inputs_are_never_changed() -> None:
    ids = np.array([3, 4, 9999])
    ids.setflags(write=False)
    with pytest.raises(BlockIdError):
        PLAN.pair([ids], [[0, 1, 2]])
    assert ids.tolist() == [3, 4, 9999]
    good = [3, 4]
    PLAN.pair([good], [(0, 1)])
    assert good == [3, 4]


@pytest.mark.parametrize("name", [name for name in nixl_fast.__all__ if name.endswith("Error")])
def test_errors_pickle_and_have_one_root(name: str) -> None:
    error = getattr(nixl_fast, name)("group 0: 1 != 2")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, NixlFastError)
    assert (type(again), str(again)) == (type(error), str(error))
    runtime = ("StalePlanError", "TransferError")
    assert isinstance(error, RuntimeError) == (name in runtime)
    assert isinstance(error, ValueError) == (name not in (*runtime, "NixlFastError"))


@pytest.mark.parametrize("group", [-1, 1, 2**70, False, 0.0, "0"])
def test_a_group_that_the_plan_does_not_have(group: Any) -> None:
    pairing = PLAN.pair([[1]], [[2]], num_tokens=128)
    for ask in (pairing.kernel_pairs, pairing.untransferred):
        with pytest.raises(IndexError, match=rf"group {group!r} \(.*\) of a plan that has 1"):
            ask(group)
