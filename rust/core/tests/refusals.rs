//! What a plan refuses to be made of. The Python layouts and plans refuse most of it before; the core does not rely on it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::expect_used, missing_docs)]

use nixl_fast_core::{Direction, Group, Order, Plan, Positions, Segment, Side, Span, Table, Take};
use proptest::prelude::*;

const POSITIONS: Positions =
    Positions { block_tokens: 16, units: 1, limit: 8, null: None, pages: 1, ranks: 1, rank: 0 };
const SPAN: Span = Span { base: 4096, stride: 64, blocks: 8, split: 1, device: 0 };

fn group(local: Positions, remote: Positions) -> Group {
    Group { order: Order::Start, unit_tokens: 16, local, remote }
}

fn segment(local: Span, remote: Span) -> Segment {
    Segment { name: "region 0".to_owned(), len: 64, local, remote, groups: vec![0], take: Take::All }
}

fn made(group: Group, segment: Segment) -> Result<Plan, String> {
    Plan::new(Direction::Read, vec![group], vec![segment], vec![]).map_err(|error| error.to_string())
}

#[test]
fn the_smallest_plan_can_be_made() {
    made(group(POSITIONS, POSITIONS), segment(SPAN, SPAN)).unwrap();
}

#[test]
fn numbers_that_contradict_each_other_are_refused() {
    let dealt = |ranks, rank| Positions { ranks, rank, ..POSITIONS };
    for (local, remote, says) in [
        (Positions { limit: 9, ..POSITIONS }, POSITIONS, "local units is 9, it must be at most the 8 descriptors"),
        (POSITIONS, Positions { limit: 9, ..POSITIONS }, "remote units is 9, it must be at most the 8 descriptors"),
        (Positions { units: 2, ..POSITIONS }, POSITIONS, "2 units of 16 tokens"),
        (Positions { pages: 0, ..POSITIONS }, POSITIONS, "pages is 0"),
        (Positions { pages: 1 << 29, ..POSITIONS }, POSITIONS, "pages is 4294967296, it must be at most 2^31"),
        (dealt(2, 2), POSITIONS, "rank is 2, it must be below the 2 ranks"),
        (dealt(2, 0), dealt(2, 1), "on ranks with common blocks"),
        (dealt(4, 3), dealt(2, 0), "on ranks with common blocks"),
        (dealt(2, 0), dealt(3, 0), "a multiple of the other side's 2"),
        (
            dealt(2, 0),
            Positions { block_tokens: 32, units: 2, limit: 4, ..POSITIONS },
            "unless both sides have equal blocks",
        ),
    ] {
        let error = made(group(local, remote), segment(SPAN, SPAN)).expect_err(says);
        assert!(error.contains(says), "{error}");
    }
    for (local, says) in [
        (Span { stride: 63, ..SPAN }, "stride 63 is smaller than the 1 x 64 bytes"),
        (Span { stride: 63, blocks: 2, ..SPAN }, "stride 63 is smaller than the 1 x 64 bytes"),
        (Span { base: u64::MAX - 510, ..SPAN }, "last byte lies past 2^64"),
        (Span { split: 0, ..SPAN }, "units per block is 0"),
    ] {
        let error = made(group(POSITIONS, POSITIONS), segment(local, SPAN)).expect_err(says);
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn lists_end_at_their_limits() {
    let span = |blocks, split, stride| Span { base: 0, stride, blocks, split, device: 0 };
    let table = |span: Span| Table::new(&[Segment { len: 1, ..segment(span, span) }], Side::Local);
    for (fits, over, says) in [
        (
            span(1 << 31, 1, 1),
            span((1 << 31) + 1, 1, 1),
            "table has 2147483649 descriptors, int32 indices allow 2147483648",
        ),
        (span(1 << 23, 2, 3), span((1 << 23) + 1, 2, 3), "rows of the local table is 8388609"),
    ] {
        assert!(table(fits).is_ok());
        let error = table(over).expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    }
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0..6_u32, 1 => any::<u32>().prop_map(|value| value >> 8), 1 => any::<u32>()]
}

fn positions() -> impl Strategy<Value = Positions> {
    (small(), small(), 0..40_u32, prop::option::of(small()), 1..4_u32, small(), small()).prop_map(
        |(block_tokens, units, limit, null, pages, ranks, rank)| Positions {
            block_tokens,
            units,
            limit,
            null,
            pages,
            ranks,
            rank,
        },
    )
}

fn any_span() -> impl Strategy<Value = Span> {
    (any::<u64>(), prop_oneof![4 => 0..64_u64, 1 => any::<u64>()], 0..200_u32, small())
        .prop_map(|(base, stride, blocks, split)| Span { base, stride, blocks, split, device: 0 })
}

fn any_group() -> impl Strategy<Value = Group> {
    let order =
        prop_oneof![Just(Order::Start), Just(Order::Slots), small().prop_map(|tokens| Order::Window { tokens })];
    // Mostly numbers that agree, or hardly a plan could be made.
    (order, small(), positions(), positions(), 0..8_u32).prop_map(|(order, unit_tokens, mut local, mut remote, odd)| {
        for side in [&mut local, &mut remote] {
            if odd != 0 {
                side.units = if order == Order::Slots { 1 } else { side.units.clamp(1, 5) };
                side.block_tokens = side.units.saturating_mul(unit_tokens.max(1));
                (side.ranks, side.rank) = if odd == 1 { (2, side.rank % 2) } else { (1, 0) };
            }
        }
        Group { order, unit_tokens: if odd == 0 { unit_tokens } else { unit_tokens.max(1) }, local, remote }
    })
}

fn any_segment() -> impl Strategy<Value = Segment> {
    let take = prop_oneof![4 => Just(Take::All), 1 => Just(Take::Rest), 1 => small().prop_map(Take::Whole)];
    (
        any_span(),
        any_span(),
        prop_oneof![4 => 1..9_u64, 1 => any::<u64>()],
        prop::collection::vec(0..3_usize, 0..3),
        take,
    )
        .prop_map(|(local, remote, len, groups, take)| Segment {
            name: String::new(),
            len,
            local,
            remote,
            groups,
            take,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_numbers_at_all_make_the_core_panic(
        groups in prop::collection::vec(any_group(), 0..3),
        segments in prop::collection::vec(any_segment(), 0..4),
        sharing in prop::collection::vec(prop::collection::vec(0..3_usize, 0..3), 0..2),
        local in prop::collection::vec(prop::collection::vec(0..42_u32, 0..6), 0..3),
        remote in prop::collection::vec(prop::collection::vec(0..42_u32, 0..6), 0..3),
        tokens in prop::option::of(prop_oneof![0..80_u64, any::<u64>()]),
        computed in prop::option::of(prop::collection::vec(prop::option::of(small()), 0..3)),
        read in any::<bool>(),
    ) {
        let direction = if read { Direction::Read } else { Direction::Write };
        let Ok(plan) = Plan::new(direction, groups, segments, sharing) else { return Ok(()) };
        let Ok(pairs) = plan.pair(&local, &remote, tokens, computed.as_deref()) else { return Ok(()) };
        for side in [Side::Local, Side::Remote] {
            let count: u64 = plan.segments().iter().map(|segment| segment.span(side).count()).sum();
            let ids = plan.indices(&pairs, side);
            prop_assert_eq!(ids.len() as u64, pairs.descriptors);
            prop_assert!(ids.iter().all(|id| u64::try_from(*id).unwrap() < count));
        }
    }
}
