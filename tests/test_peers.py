"""Unequal tensor parallelism, context parallelism, pipeline stages: which bytes each rank takes from which."""

from collections.abc import Sequence

import pytest

from nixl_fast import (
    BlockOrder,
    ConvProjection,
    Direction,
    EngineLayout,
    GeometryError,
    Group,
    GroupKind,
    MambaState,
    PairingError,
    PeerPlans,
    Region,
    TransferPlan,
    plan_peer,
)

FULL, MLA, MAMBA = GroupKind.FULL_ATTENTION, GroupKind.MLA, GroupKind.MAMBA


def ranks(
    size: int, block_len: int, *, heads: int, engine: str = "p", blocks: int = 5, **fields: object
) -> list[EngineLayout]:
    """One region per rank at round addresses: rank r at (r + 1) * 100000."""
    region = {name: fields.pop(name) for name in ("block_stride", "order", "layer") if name in fields}
    group = fields.pop("group", Group(FULL, 16))
    return [
        EngineLayout(
            engine,
            (group,),  # type: ignore[arg-type]
            (Region((rank + 1) * 100_000, block_len, blocks + rank, **region),),  # type: ignore[arg-type]
            tp_rank=rank,
            tp_size=size,
            num_kv_heads=heads,
            **fields,  # type: ignore[arg-type]
        )
        for rank in range(size)
    ]


def sources(plans: Sequence[TransferPlan]) -> list[int]:
    return [plan.remote.tp_rank for plan in plans]


def test_p39_a_head_slice_keeps_the_page_stride() -> None:
    # page of 4 heads x 16 bytes; consumer rank 1 of 2 holds heads 2 and 3, producer rank 2 of 4 holds head 2
    consumer = ranks(2, 32, heads=4, engine="d", block_stride=64)[1]
    plan = plan_peer(consumer, ranks(4, 16, heads=4))[0]
    assert plan.remote.tp_rank == 2
    assert plan.local_table.tolist() == [[200_000, 16, 0, 64, 6]]
    consumer = EngineLayout("d", (Group(FULL, 16),), (Region(1000, 64, 5),), num_kv_heads=4)
    plan = plan_peer(consumer, ranks(4, 16, heads=4))[2]
    assert plan.local_table.tolist() == [[1032, 16, 0, 64, 5]]
    assert plan.remote_table.tolist() == [[300_000, 16, 0, 16, 7]]  # its own block count and address


def test_more_producers_than_consumers_fill_a_block_slice_by_slice() -> None:
    plans = plan_peer(ranks(1, 64, heads=4, engine="d")[0], ranks(4, 16, heads=4))
    assert [plan.local_table.tolist()[0][:2] for plan in plans] == [[100_000 + 16 * rank, 16] for rank in range(4)]
    assert plans.notify_only == ()


@pytest.mark.parametrize("rank", range(4))
def test_fewer_producers_than_consumers_give_a_slice_each(rank: int) -> None:
    plans = plan_peer(ranks(4, 16, heads=4, engine="d")[rank], ranks(2, 32, heads=4))
    assert sources(plans) == [rank // 2]
    assert plans[0].remote_table.tolist()[0][:2] == [100_000 * (rank // 2 + 1) + 16 * (rank % 2), 16]


@pytest.mark.parametrize(
    ("heads", "producers", "consumers", "local_len", "right", "naive"),
    [
        pytest.param(8, 8, 16, 8192, 8192, 16384, id="P29-8-heads-8-to-16"),
        pytest.param(4, 2, 8, 4096, 8192, 16384, id="P29-4-heads-2-to-8"),
        pytest.param(4, 4, 8, 8192, 8192, 16384, id="P29-4-heads-4-to-8"),
        pytest.param(8, 4, 8, 4096, 8192, 8192, id="P29-control"),
    ],
)
def test_p29_lengths_follow_heads_per_rank(
    heads: int, producers: int, consumers: int, local_len: int, right: int, naive: int
) -> None:
    consumer = ranks(consumers, local_len, heads=heads, engine="d")[3]
    assert len(plan_peer(consumer, ranks(producers, right, heads=heads))) == 1
    if naive != right:
        with pytest.raises(GeometryError, match="bytes per unit"):
            plan_peer(consumer, ranks(producers, naive, heads=heads))


def test_each_distinct_head_is_read_once() -> None:
    # 4 heads on 8 producer ranks: ranks 2h and 2h + 1 hold head h
    plans = plan_peer(ranks(1, 64, heads=4, engine="d")[0], ranks(8, 16, heads=4))
    assert sources(plans) == [0, 2, 4, 6]
    assert [rank.tp_rank for rank in plans.notify_only] == [1, 3, 5, 7]


@pytest.mark.parametrize(("producers", "consumers", "heads"), [(8, 8, 4), (8, 16, 4), (16, 8, 4), (2, 8, 1), (4, 2, 2)])
def test_readers_of_one_head_spread_over_its_copies_and_every_rank_hears(
    producers: int, consumers: int, heads: int
) -> None:
    def length(size: int) -> int:
        return 16 * max(1, heads // size)

    remote = ranks(producers, length(producers), heads=heads)
    made = [plan_peer(rank, remote) for rank in ranks(consumers, length(consumers), heads=heads, engine="d")]
    loads = [sum(rank in sources(plans) for plans in made) for rank in range(producers)]
    heard = {source for plans in made for source in [*sources(plans), *(rank.tp_rank for rank in plans.notify_only)]}
    assert heard == set(range(producers))
    assert max(loads) <= max(1, -(-consumers // producers))


@pytest.mark.parametrize(("rank", "source"), [(0, 0), (1, 4)])
def test_p31_replicated_regions_come_whole_from_one_rank(rank: int, source: int) -> None:
    group = Group(MLA, 16)
    plans = plan_peer(ranks(2, 576, heads=1, engine="d", group=group)[rank], ranks(8, 576, heads=1, group=group))
    assert sources(plans) == [source]
    assert plans[0].remote_table.tolist() == [[100_000 * (source + 1), 576, 0, 576, 5 + source]]
    assert [other.tp_rank for other in plans.notify_only] == [
        other for other in range(rank * 4, rank * 4 + 4) if other != source
    ]


def mixed(size: int, engine: str) -> list[EngineLayout]:
    """Full attention of 4 heads beside MLA."""
    return [
        EngineLayout(
            engine,
            (Group(FULL, 16), Group(MLA, 16)),
            (Region(1000, 64 // size, 8, groups=(0,)), Region(9000, 48, 8, groups=(1,))),
            tp_rank=rank,
            tp_size=size,
            num_kv_heads=4,
        )
        for rank in range(size)
    ]


def test_p31_a_mixed_model_decides_per_region() -> None:
    plans = plan_peer(mixed(1, "d")[0], mixed(4, "p"))
    assert [len(plan.local_table) for plan in plans] == [2, 1, 1, 1]
    assert plans[0].local_table.tolist() == [[1000, 16, 0, 64, 8], [9000, 48, 0, 48, 8]]
    assert plans[3].local_table.tolist() == [[1048, 16, 0, 64, 8]]
    # rank 3's plan moves nothing of the MLA group, but still checks its ids
    assert plans[3].pair([[1], [2]], [[3], [4]]).num_descs == 1


def test_p35_groups_that_a_plan_leaves_out_are_named() -> None:
    plans = plan_peer(mixed(1, "d")[0], mixed(4, "p"))
    assert "group 1: nothing is moved with this rank" in plans[3].explain()
    assert "nothing is moved" not in plans[0].explain()


def hybrid(size: int, engine: str, *, sharded: bool = True) -> list[EngineLayout]:
    """x = 8, B = 2, C = 2 channels of 6 bytes and a state of 96 bytes over all ranks; no attention."""
    small = 12 // size if sharded else 12
    conv = (ConvProjection(48 // size), ConvProjection(small, sharded), ConvProjection(small, sharded))
    return [
        EngineLayout(
            engine,
            (Group(MAMBA, 16),),
            (),
            MambaState((Region(1000, 512, 4),), conv, 96 // size),
            tp_rank=rank,
            tp_size=size,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("rank", "reads"), [(0, [(0, 24), (48, 6), (60, 6), (72, 48)]), (1, [(24, 24), (54, 6), (66, 6), (120, 48)])]
)
def test_p14_each_projection_is_split_on_its_own(rank: int, reads: list[tuple[int, int]]) -> None:
    (plan,) = plan_peer(hybrid(2, "d")[rank], hybrid(1, "p"))
    assert [(addr - 1000, size) for addr, size, *_ in plan.remote_table.tolist()] == reads
    assert [(addr - 1000, size) for addr, size, *_ in plan.local_table.tolist()] == [
        (0, 24),
        (24, 6),
        (30, 6),
        (36, 48),
    ]


def test_p14_the_other_way_round() -> None:
    plans = plan_peer(hybrid(1, "d")[0], hybrid(2, "p"))
    assert [[(addr - 1000, size) for addr, size, *_ in plan.local_table.tolist()] for plan in plans] == [
        [(0, 24), (48, 6), (60, 6), (72, 48)],
        [(24, 24), (54, 6), (66, 6), (120, 48)],
    ]


def test_unsharded_projections_are_copied_whole_from_exactly_one_rank() -> None:
    plans = plan_peer(hybrid(1, "d", sharded=False)[0], hybrid(2, "p", sharded=False))
    assert [[(addr - 1000, size) for addr, size, *_ in plan.local_table.tolist()] for plan in plans] == [
        [(0, 24), (48, 12), (60, 12), (72, 48)],
        [(24, 24), (120, 48)],
    ]


def test_p21_state_totals_have_to_agree() -> None:
    wrong = MambaState((Region(1000, 512, 4),), hybrid(1, "p")[0].mamba.conv, 192)  # type: ignore[union-attr]
    remote = EngineLayout("p", (Group(MAMBA, 16),), (), wrong)
    with pytest.raises(
        GeometryError, match=r"mamba state .* local 48 bytes on each of 2 ranks, remote 192 on each of 1"
    ):
        plan_peer(hybrid(2, "d")[0], [remote])


def dcp(size: int, engine: str) -> list[EngineLayout]:
    return [
        EngineLayout(engine, (Group(MLA, 16),), (Region(1000, 64, 32),), tp_rank=rank, tp_size=size, dcp_size=size)
        for rank in range(size)
    ]


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 2]), (1, [1, 3])])
def test_p30_context_parallel_ranks_are_paired_by_global_block(rank: int, expected: list[int]) -> None:
    plans = plan_peer(dcp(2, "d")[rank], dcp(4, "p"))
    assert sources(plans) == expected
    # 8 blocks of 16 tokens: consumer slots 0..3 at ids 10..13, producer slots 0, 1 at ids 20, 21
    pairings = [plan.pair([[10, 11, 12, 13]], [[20, 21]], num_tokens=128) for plan in plans]
    assert [[ids.tolist() for ids in pairing.kernel_pairs(0)] for pairing in pairings] == [
        [[20, 21], [10, 12]],
        [[20, 21], [11, 13]],
    ]


def test_context_parallel_tail_is_reported_by_the_plan_it_belongs_to() -> None:
    even, odd = plan_peer(dcp(2, "d")[0], dcp(4, "p"))
    # 5 blocks: consumer rank 0 holds global 0, 2, 4 and lists one more slot, which would be global 6
    ids = ([10, 11, 12, 13],), ([20, 21],)
    pairings = [plan.pair(*ids, num_tokens=80, num_computed_blocks=[0]) for plan in (even, odd)]
    assert [pairing.kernel_pairs(0)[1].tolist() for pairing in pairings] == [[10, 12], [11]]
    assert [pairing.untransferred(0).tolist() for pairing in pairings] == [[], [13]]


def test_context_parallel_ranks_past_the_remainder_need_a_position() -> None:
    # 7 blocks on 2 ranks: rank 1 holds 3 (global 1, 3, 5), but an engine may list a fourth on it
    plan = plan_peer(dcp(2, "d")[1], dcp(2, "p"))[0]
    with pytest.raises(PairingError, match="pass num_computed_blocks"):
        plan.pair([[7, 8, 9]], [[20, 21, 22]], num_tokens=7 * 16)
    pairing = plan.pair([[7, 8, 9]], [[20, 21, 22]], num_tokens=7 * 16, num_computed_blocks=[0])
    assert [ids.tolist() for ids in pairing.kernel_pairs(0)] == [[20, 21, 22], [7, 8, 9]]
    with pytest.raises(PairingError, match="below 2"):
        plan.pair([[7]], [[20]], num_tokens=2**48)


def test_context_parallel_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(GeometryError, match="dcp_size: local 2, remote 3"):
        plan_peer(dcp(2, "d")[0], dcp(3, "p"))


def stage(index: int, stages: int, layers: range, engine: str = "p") -> EngineLayout:
    """Two regions per layer; every region is 1000 bytes after the one before."""
    regions = [
        Region(1000 * (1 + 2 * place + part), 16, 4, layer=f"layers.{layer}.{'kv'[part]}")
        for place, layer in enumerate(layers)
        for part in range(2)
    ]
    return EngineLayout(engine, (Group(FULL, 16),), tuple(regions), pp_rank=index, pp_size=stages)


def test_p34_stages_are_matched_by_layer_name() -> None:
    consumer = stage(0, 1, range(8), "d")
    plans = plan_peer(consumer, [stage(0, 2, range(4)), stage(1, 2, range(4, 8))])
    assert [plan.remote.pp_rank for plan in plans] == [0, 1]
    assert plans[1].local_table[:, 0].tolist() == [1000 * (1 + region) for region in range(8, 16)]
    assert plans[1].remote_table[:, 0].tolist() == [1000 * (1 + region) for region in range(8)]


def test_p34_the_other_way_round() -> None:
    plans = plan_peer(stage(1, 2, range(4, 8), "d"), [stage(0, 1, range(8))])
    assert plans[0].remote_table[:, 0].tolist() == [1000 * (1 + region) for region in range(8, 16)]


@pytest.mark.parametrize(
    ("remote", "words"),
    [
        pytest.param([stage(0, 2, range(4))], ["region 8 (layers.4.k)", "16 would stay unwritten"], id="stage-missing"),
        pytest.param(
            [stage(0, 2, range(5)), stage(1, 2, range(4, 8))],
            ["region 8 (layers.4.k)", "0 would stay unwritten", "16 be written twice"],
            id="layer-on-two-stages",
        ),
        pytest.param([stage(0, 1, range(7))], ["layers.7.k", "no remote region"], id="layer-missing"),
        pytest.param([stage(0, 1, range(9))], ["layers.8.k", "no local region"], id="layer-unknown"),
        pytest.param([stage(0, 2, range(4))] * 2, ["rank 0 of stage 0", "twice"], id="rank-twice"),
        pytest.param([], ["empty"], id="no-ranks"),
        pytest.param(stage(0, 2, range(4)), ["one layout", "all the peer's ranks"], id="no-list"),
    ],
)
def test_incomplete_stages(remote: list[EngineLayout], words: list[str]) -> None:
    with pytest.raises(GeometryError) as refused:
        plan_peer(stage(0, 1, range(8), "d"), remote)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_stages_need_names() -> None:
    with pytest.raises(GeometryError, match="several pipeline stages needs a layer name"):
        EngineLayout("p", (Group(FULL, 16),), (Region(1000, 16, 4),), pp_rank=0, pp_size=2)


def test_a_missing_rank_is_refused_with_the_byte_count() -> None:
    with pytest.raises(
        GeometryError, match="of 64 bytes of every block 16 would stay unwritten and 0 be written twice"
    ):
        plan_peer(ranks(1, 64, heads=4, engine="d")[0], ranks(4, 16, heads=4)[:3])


def test_ranks_of_two_engines_are_refused() -> None:
    with pytest.raises(GeometryError, match="remote ranks differ in engine_id: 'p' of rank 0, 'q' of rank 1"):
        plan_peer(ranks(1, 64, heads=4)[0], [ranks(4, 16, heads=4)[0], ranks(4, 16, heads=4, engine="q")[1]])


def test_heads_that_have_no_certain_place_are_refused() -> None:
    with pytest.raises(GeometryError, match="num_kv_heads 6 and tp_size 4"):
        plan_peer(ranks(1, 96, heads=6, engine="d")[0], ranks(4, 24, heads=6))


def test_ranks_with_nothing_in_common_have_no_plan() -> None:
    with pytest.raises(GeometryError, match="nothing in common"):
        TransferPlan(ranks(2, 32, heads=4, engine="d")[1], ranks(4, 16, heads=4)[0])


def test_heads_and_tokens_can_both_be_cut_from_head_major_blocks() -> None:
    # consumer: 2 heads, 4 tokens a block, 2 bytes a token and head; producer rank 1: 1 head, 2 tokens a block
    head_major = BlockOrder.HEAD_MAJOR
    consumer = ranks(1, 16, heads=2, engine="d", group=Group(FULL, 4), order=head_major)[0]
    producers = ranks(2, 4, heads=2, group=Group(FULL, 2), order=head_major)
    plans = plan_peer(consumer, producers)
    # head 1 of block b: two units of 2 tokens (4 bytes) at b*16 + 8 and b*16 + 12
    assert plans[1].local_table.tolist() == [[100_008 + 16 * block, 4, 0, 4, 2] for block in range(5)]
    assert plans[1].remote_table.tolist() == [[200_000, 4, 0, 4, 6]]
    pairing = plans[1].pair([[3]], [[4, 5]], num_tokens=4)
    assert (pairing.local_desc_ids.tolist(), pairing.remote_desc_ids.tolist()) == ([6, 7], [4, 5])


def test_tokens_are_cut_head_by_head_where_blocks_are_head_major() -> None:
    consumer = ranks(1, 16, heads=2, engine="d", group=Group(FULL, 4), order=BlockOrder.HEAD_MAJOR)[0]
    producer = ranks(1, 8, heads=2, group=Group(FULL, 2), order=BlockOrder.HEAD_MAJOR)
    (plan,) = plan_peer(consumer, producer)
    pairing = plan.pair([[1]], [[4, 3]], num_tokens=4)
    local = plan.expanded("local")[pairing.local_desc_ids, 0] - 100_016
    remote = plan.expanded("remote")[pairing.remote_desc_ids, 0] - 100_000
    assert local.tolist() == [0, 4, 8, 12]  # head 0 tokens 0-1, 2-3; head 1 tokens 0-1, 2-3
    assert remote.tolist() == [32, 24, 36, 28]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        pytest.param(None, None, ["by heads and by tokens", "Region.order"], id="unknown"),
        pytest.param(
            BlockOrder.TOKEN_MAJOR, BlockOrder.TOKEN_MAJOR, ["token_major", "one piece per token"], id="token-major"
        ),
    ],
)
def test_cuts_that_memory_does_not_allow(ours: BlockOrder | None, theirs: BlockOrder | None, words: list[str]) -> None:
    consumer = ranks(1, 32, heads=4, engine="d", group=Group(FULL, 4), order=ours)[0]
    with pytest.raises(GeometryError) as refused:
        plan_peer(consumer, ranks(2, 8, heads=4, group=Group(FULL, 2), order=theirs))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_orders_that_differ_are_refused() -> None:
    consumer = ranks(1, 64, heads=4, engine="d", order=BlockOrder.TOKEN_MAJOR)[0]
    with pytest.raises(GeometryError, match="order: local token_major, remote head_major"):
        plan_peer(consumer, ranks(1, 64, heads=4, order=BlockOrder.HEAD_MAJOR))


def test_one_side_s_order_does_not_speak_for_the_other() -> None:
    consumer = ranks(1, 64, heads=4, engine="d", group=Group(FULL, 4))[0]
    with pytest.raises(GeometryError, match="order: local None, remote head_major"):
        plan_peer(consumer, ranks(1, 32, heads=4, group=Group(FULL, 2), order=BlockOrder.HEAD_MAJOR))


def test_a_replicated_region_of_several_heads_is_cut_head_by_head() -> None:
    def engine(name: str, tokens: int) -> EngineLayout:
        region = Region(1000, 8 * tokens, 4, replicated=True, order=BlockOrder.HEAD_MAJOR)
        return EngineLayout(name, (Group(FULL, tokens),), (region,), num_kv_heads=4)

    plan = TransferPlan(engine("d", 4), engine("p", 2))
    # a block is 4 heads x tokens x 2 bytes: units of 2 tokens are 4 bytes, and head h starts at h * 8 here, h * 4 there
    assert plan.local_table[:, 1].tolist()[0] == 4
    assert len({segment.name for segment in plan.segments}) == 4


def test_mla_and_heads_in_one_region_are_refused_where_heads_are_cut() -> None:
    def engine(name: str, size: int, rank: int = 0) -> EngineLayout:
        groups = (Group(FULL, 16), Group(MLA, 16))
        return EngineLayout(name, groups, (Region(1000, 64 // size, 4),), None, rank, size, num_kv_heads=4)

    assert TransferPlan(engine("d", 1), engine("p", 1)).local_table.tolist() == [[1000, 64, 0, 64, 4]]
    with pytest.raises(GeometryError, match="region 0 holds mla blocks"):
        plan_peer(engine("d", 1), [engine("p", 2, rank) for rank in range(2)])


def test_a_push_to_some_of_the_ranks_that_wait_is_refused() -> None:
    consumers = ranks(2, 32, heads=4, engine="d")
    with pytest.raises(GeometryError, match="remote rank 1 of stage 0 waits for this rank"):
        plan_peer(ranks(1, 64, heads=4)[0], consumers[:1], direction=Direction.WRITE)


def test_a_push_is_the_same_cut_seen_from_the_producer() -> None:
    producers, consumers = ranks(4, 16, heads=4), ranks(2, 32, heads=4, engine="d")
    pulled = [plan for consumer in consumers for plan in plan_peer(consumer, producers)]
    pushed = [plan for producer in producers for plan in plan_peer(producer, consumers, direction=Direction.WRITE)]
    assert [(p.local.tp_rank, p.remote.tp_rank) for p in pulled] == [
        (p.remote.tp_rank, p.local.tp_rank) for p in pushed
    ]
    for pull, push in zip(pulled, pushed, strict=True):
        assert pull.local_table.tolist() == push.remote_table.tolist()
        assert pull.remote_table.tolist() == push.local_table.tolist()


def test_one_list_per_memory_type_with_one_index_space() -> None:
    def engine(name: str, blocks: int) -> EngineLayout:
        regions = (
            Region(1000, 16, blocks),
            Region(2000, 16, blocks, mem_type="VRAM", device_id=1),
            Region(3000, 16, blocks),
        )
        return EngineLayout(name, (Group(FULL, 16),), regions)

    plan = TransferPlan(engine("d", 4), engine("p", 6))
    assert [(lane.local_mem_type, lane.local_table[:, 0].tolist(), lane.local_start) for lane in plan.lanes] == [
        ("DRAM", [1000, 3000], 0),
        ("VRAM", [2000], 8),
    ]
    assert [(lane.remote_mem_type, lane.remote_table[:, 0].tolist(), lane.remote_start) for lane in plan.lanes] == [
        ("DRAM", [1000, 3000], 0),
        ("VRAM", [2000], 12),
    ]
    pairing = plan.pair([[3, 1]], [[0, 2]])
    assert [[ids.tolist() for ids in lane] for lane in plan.split(pairing)] == [
        [[3, 1, 7, 5], [0, 2, 6, 8]],
        [[3, 1], [0, 2]],
    ]


def test_coarse_units_move_the_same_bytes_with_fewer_descriptors() -> None:
    def engine(name: str, stride: int | None) -> EngineLayout:
        return EngineLayout(name, (Group(FULL, 128, 4),), (Region(1000, 16, 40, stride), Region(9000, 16, 40, stride)))

    coarse, fine = (TransferPlan(engine("d", stride), engine("p", stride)) for stride in (None, 32))
    request = ([[3, 7]], [[5, 6]])
    full = [plan.pair(*request, num_tokens=256) for plan in (coarse, fine)]
    assert [pairing.num_descs for pairing in full] == [4, 16]
    # 7 kernel blocks of 32 tokens hold 200: one logical block whole, three kernel blocks of the next
    part = [plan.pair(*request, num_tokens=200) for plan in (coarse, fine)]
    assert [pairing.num_descs for pairing in part] == [2 * (1 + 3), 2 * 7]
    for pairings in (full, part):
        assert pairings[0].num_bytes == pairings[1].num_bytes
        first, second = pairings
        assert first.kernel_pairs(0)[0].tolist() == second.kernel_pairs(0)[0].tolist()
        assert first.untransferred(0).tolist() == second.untransferred(0).tolist()
    moved = []
    for side, ids in (("local", part[0].local_desc_ids), ("remote", part[0].remote_desc_ids)):
        rows = coarse.expanded(side)[ids].tolist()
        moved.append([addr + byte - 1000 for addr, size, _ in rows for byte in range(0, size, 16)])
    assert moved[0][:7] == [16 * unit for unit in [12, 13, 14, 15, 28, 29, 30]]
    assert moved[1][:7] == [16 * unit for unit in [20, 21, 22, 23, 24, 25, 26]]


def test_choices_that_do_not_exist_are_refused() -> None:
    layout = ranks(1, 64, heads=4)[0]
    with pytest.raises(GeometryError, match="direction is 'push', it must be one of read, write"):
        TransferPlan(layout, layout, direction="push")  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match="side is 'both', it must be one of local, remote"):
        TransferPlan(layout, layout).expanded("both")


def test_plan_peer_returns_plans_like_a_tuple() -> None:
    plans = plan_peer(ranks(1, 64, heads=4, engine="d")[0], ranks(2, 32, heads=4))
    assert isinstance(plans, tuple)
    assert isinstance(plans, PeerPlans)
    assert all(isinstance(plan, TransferPlan) for plan in plans)
