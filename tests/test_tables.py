"""Descriptor tables: tiny regions with round addresses, the expected rows written out."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nixl_fast import ConvProjection, EngineLayout, Group, GroupKind, MambaState, Region, Side, TransferPlan

FULL, WINDOW, MAMBA = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.MAMBA


def same(groups: tuple[Group, ...], regions: tuple[Region, ...], mamba: MambaState | None = None) -> TransferPlan:
    layout = EngineLayout("engine", groups, regions, mamba)
    return TransferPlan(layout, layout)


def flat(rows: np.ndarray) -> list[list[int]]:
    """Strided rows, one descriptor at a time."""
    return [[addr + i * stride, size, dev] for addr, size, dev, stride, count in rows.tolist() for i in range(count)]


def test_p37_p38_p39_two_dense_regions() -> None:
    plan = same((Group(FULL, 16),), (Region(1000, 16, 5, device_id=3), Region(9000, 16, 5, device_id=3)))
    assert plan.local_table.tolist() == [[1000, 16, 3, 16, 5], [9000, 16, 3, 16, 5]]
    expanded = plan.expanded(Side.LOCAL)
    assert expanded.tolist() == [[base + 16 * i, 16, 3] for base in (1000, 9000) for i in range(5)]
    for table in (plan.local_table, plan.remote_table, expanded):
        assert (table.dtype, table.flags.c_contiguous) == (np.dtype(np.uint64), True)


def test_padded_pages_keep_one_row() -> None:
    plan = same((Group(FULL, 16),), (Region(1000, 16, 5, 64),))
    assert plan.local_table.tolist() == [[1000, 16, 0, 64, 5]]
    assert plan.expanded(Side.LOCAL).tolist() == flat(plan.local_table)


def test_split_dense_blocks_are_one_row_and_split_padded_blocks_one_row_each() -> None:
    local = EngineLayout("d", (Group(FULL, 32),), (Region(1000, 32, 3), Region(5000, 32, 3, 40)))
    remote = EngineLayout("p", (Group(FULL, 16),), (Region(2000, 16, 9), Region(7000, 16, 9, 20)))
    plan = TransferPlan(local, remote)
    assert plan.unit_tokens == 16
    assert plan.local_table.tolist() == [
        [1000, 16, 0, 16, 6],
        [5000, 16, 0, 16, 2],
        [5040, 16, 0, 16, 2],
        [5080, 16, 0, 16, 2],
    ]
    assert plan.remote_table.tolist() == [[2000, 16, 0, 16, 9], [7000, 16, 0, 20, 9]]
    # local block 2 is units 4, 5 of both regions; region 1 starts at descriptor 6 here and 9 there
    pairing = plan.pair([[2]], [[7, 3]], num_tokens=32)
    assert pairing.local_desc_ids.tolist() == [4, 5, 10, 11]
    assert pairing.remote_desc_ids.tolist() == [7, 3, 16, 12]


def test_a_region_of_zero_blocks_has_no_row() -> None:
    groups = (Group(FULL, 16), Group(FULL, 16))
    regions = (Region(1000, 16, 4, groups=(0,)), Region(5000, 16, 0, groups=(1,)), Region(9000, 16, 4, groups=(0,)))
    plan = same(groups, regions)
    assert plan.local_table.tolist() == [[1000, 16, 0, 16, 4], [9000, 16, 0, 16, 4]]
    assert plan.pair([[2], []], [[1], []]).local_desc_ids.tolist() == [2, 6]


def test_the_last_byte_may_be_the_last_address() -> None:
    plan = same((Group(FULL, 16),), (Region(2**64 - 80, 16, 5),))
    assert plan.expanded(Side.LOCAL)[-1].tolist() == [2**64 - 16, 16, 0]


def test_mamba_worked_rows() -> None:
    page = Region(1000, 16, 4, device_id=2)
    state = MambaState((page,), (ConvProjection(8), ConvProjection(4), ConvProjection(4)), 16)
    plan = same((Group(MAMBA, 1, 2),), (), state)
    assert plan.local_table.tolist() == [
        [1000, 8, 2, 32, 2],
        [1008, 4, 2, 32, 2],
        [1012, 4, 2, 32, 2],
        [1016, 16, 2, 32, 2],
    ]


def test_p13_state_descriptors_come_after_all_attention_descriptors() -> None:
    pages = (Region(0x1000, 16, 12), Region(0x2000, 16, 12))
    conv = (ConvProjection(8), ConvProjection(4), ConvProjection(4))
    hybrid = EngineLayout("d", (Group(FULL, 48, 3), Group(MAMBA, 48, 3)), pages, MambaState(pages, conv, 32))
    peer = EngineLayout("p", (Group(FULL, 16), Group(MAMBA, 16, 3)), pages, MambaState(pages, conv, 32))
    plan = TransferPlan(hybrid, peer)
    assert plan.local_table[:, 4].sum() == 24 + 32
    pairing = plan.pair([[0], [1]], [[0, 1, 2], [1]], num_tokens=48)
    assert pairing.local_desc_ids.tolist() == [0, 1, 2, 12, 13, 14, 25, 29, 33, 37, 41, 45, 49, 53]


def test_p09_a_thousand_kernel_blocks_of_ratio_10_are_100_logical_ones() -> None:
    layout = EngineLayout("e", (Group(MAMBA, 16, 10),), (), MambaState((Region(0, 16, 1000),), (), 16))
    assert layout.num_blocks(0) == 100
    assert TransferPlan(layout, layout).local_table.tolist() == [[0, 16, 0, 160, 100]]


@pytest.mark.parametrize(("conv", "count"), [pytest.param(3, 60, id="mamba2"), pytest.param(1, 30, id="mamba1")])
def test_p15_descriptors_per_state(conv: int, count: int) -> None:
    pages = tuple(Region(0x1000 * layer, 64, 5) for layer in range(1, 4))
    plan = same((Group(MAMBA, 16),), (), MambaState(pages, (ConvProjection(8),) * conv, 32))
    assert plan.local_table[:, 4].sum() == count


def test_order_is_by_region_then_group_then_list() -> None:
    groups = (Group(FULL, 16), Group(FULL, 16))
    regions = (Region(1000, 16, 10), Region(2000, 16, 10, groups=(1,)), Region(3000, 16, 10, groups=(0,)))
    pairing = same(groups, regions).pair([[4, 1], [3]], [[4, 1], [3]])
    assert pairing.local_desc_ids.tolist() == [4, 1, 3, 13, 24, 21]


def test_p08_p36_every_group_has_its_own_unit() -> None:
    # The second group's blocks hold 4 tokens here and 2 there.
    groups = ((Group(FULL, 16), Group(FULL, 4)), (Group(FULL, 16), Group(FULL, 2)))
    local = EngineLayout("d", groups[0], (Region(1000, 64, 8, groups=(0,)), Region(3000, 64, 8, groups=(1,))))
    remote = EngineLayout("p", groups[1], (Region(1000, 64, 8, groups=(0,)), Region(5000, 32, 8, groups=(1,))))
    plan = TransferPlan(local, remote)
    assert (plan.unit_tokens, plan.group_unit_tokens) == (2, (16, 2))
    assert plan.local_table.tolist() == [[1000, 64, 0, 64, 8], [3000, 32, 0, 32, 16]]
    pairing = plan.pair([[5], [3]], [[2], [6, 1]], num_tokens=4)
    assert pairing.local_desc_ids.tolist() == [5, 8 + 6, 8 + 7]
    assert pairing.remote_desc_ids.tolist() == [2, 8 + 6, 8 + 1]


@pytest.mark.parametrize(
    ("local", "remote", "runs"),
    [
        pytest.param(range(10), range(10), 101, id="P40-one-run"),
        pytest.param(range(10), [*range(5), *range(10, 15)], 202, id="P40-two-runs"),
    ],
)
def test_p40_merged_descriptors(local: list[int], remote: list[int], runs: int) -> None:
    plan = same((Group(FULL, 16),), tuple(Region(0x10000 * (i + 1), 16, 20) for i in range(101)))
    pairing = plan.pair([list(local)], [list(remote)])
    assert (pairing.num_descs, pairing.num_runs) == (1010, runs)


def test_padded_pages_do_not_merge() -> None:
    plan = same((Group(FULL, 16),), (Region(1000, 16, 20, 32),))
    assert plan.pair([list(range(10))], [list(range(10))]).num_runs == 10


def test_one_plan_serves_eight_threads() -> None:
    plan = same((Group(FULL, 64, 4),), tuple(Region(0x1000000 * (i + 1), 16, 40_000) for i in range(32)))
    ids = np.random.default_rng(0).permutation(10_000)[:2_000]
    alone = plan.pair([ids], [ids[::-1]]).remote_desc_ids.tobytes()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: plan.pair([ids], [ids[::-1]]).remote_desc_ids.tobytes(), range(32))) == {alone}
