//! What holds for any input at all: no panic, and nothing outside the lists that were given.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use std::collections::HashSet;

use std::mem::MaybeUninit;

use nixl_fast_core::{Direction, Group, Ids, Order, Plan, Positions, Segment, Side, Span, Table, Take, expand};
use proptest::prelude::*;

const IDS: Ids = Ids { side: None, group: None };

fn span() -> impl Strategy<Value = Span> {
    (0..1_u64 << 40, 0..40_u64, 0..12_u32, 1..5_u32).prop_map(|(base, pad, blocks, split)| Span {
        base,
        stride: u64::from(split) * 8 + pad * 8,
        blocks,
        split,
        device: 0,
    })
}

/// One group in one segment, with block sizes of `kernel * ratio` tokens.
fn plan() -> impl Strategy<Value = Plan> {
    let side = || (1..5_u32, 1..4_u32, 1..10_u32, prop::option::of(0..3_u32), 0..3_u64);
    (side(), side(), 0..3, 1..40_u32, any::<bool>()).prop_map(|(local, remote, order, window, read)| {
        let order = match order {
            0 => Order::Start,
            1 => Order::Window { tokens: window },
            _ => Order::Slots,
        };
        let positions = |(split, ratio, limit, null, _): (u32, u32, u32, Option<u32>, u64)| Positions {
            block_tokens: split * ratio * 2,
            units: if order == Order::Slots { 1 } else { split * ratio },
            limit,
            null,
            pages: ratio,
            ranks: 1,
            rank: 0,
        };
        let span = |side: (u32, u32, u32, Option<u32>, u64)| {
            let positions = positions(side);
            Span {
                base: 64,
                stride: 8 * (u64::from(side.0) + side.4),
                blocks: if order == Order::Slots { positions.limit } else { positions.limit * side.1 },
                split: if order == Order::Slots { 1 } else { side.0 },
                device: 0,
            }
        };
        let direction = if read { Direction::Read } else { Direction::Write };
        let group = Group { order, unit_tokens: 2, local: positions(local), remote: positions(remote) };
        let segment = Segment {
            name: "region 0".to_owned(),
            len: 8,
            local: span(local),
            remote: span(remote),
            groups: vec![0],
            take: Take::All,
        };
        Plan::new(direction, vec![group], vec![segment], vec![]).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn expansion_is_the_per_id_definition(blocks in prop::collection::vec(0..1_000_000_u32, 0..50), ratio in 1..300_u32, cut in 0..300_u32) {
        let width = 1 + cut % ratio;
        let expected: Vec<i32> =
            blocks.iter().flat_map(|b| (0..width).map(move |k| i32::try_from(b * ratio + k).unwrap())).collect();
        prop_assert_eq!(expand(&blocks, ratio, width, IDS).unwrap(), expected);
    }

    #[test]
    fn expansion_never_panics(blocks in prop::collection::vec(any::<u32>(), 0..4), ratio in any::<u32>(), width in 0..9_u32) {
        if let Ok(out) = expand(&blocks, ratio, width, IDS) {
            prop_assert!(out.iter().all(|id| *id >= 0));
        }
    }

    #[test]
    fn rows_and_expanded_rows_are_the_units_in_order(spans in prop::collection::vec((span(), span()), 0..4)) {
        let segment = |(local, remote)| Segment { name: String::new(), len: 8, local, remote, groups: vec![], take: Take::All };
        let segments: Vec<Segment> = spans.into_iter().map(segment).collect();
        let table = Table::new(&segments, Side::Local).unwrap();
        let units: Vec<u64> = segments
            .iter()
            .flat_map(|segment| (0..segment.local.count()).map(|unit| segment.local.unit(8, u32::try_from(unit).unwrap())))
            .collect();
        let flat: Vec<u64> =
            table.rows(&segments).iter().flat_map(|row| (0..row[4]).map(|i| row[0] + i * row[3])).collect();
        prop_assert_eq!(&flat, &units);
        let mut rows = vec![MaybeUninit::new(7); 3 * units.len() + 5];
        prop_assert_eq!(table.write_expanded(&segments, &mut rows), 3 * units.len());
        // SAFETY: every element was initialised when the vector was made.
        let rows: Vec<u64> = rows.iter().map(|number| unsafe { number.assume_init() }).collect();
        prop_assert_eq!(&rows[3 * units.len()..], &[7; 5]);
        prop_assert!(rows.chunks(3).take(units.len()).all(|row| row[1..] == [8, segments[0].local.device]));
        let expanded: Vec<u64> = rows.chunks(3).take(units.len()).map(|row| row[0]).collect();
        prop_assert_eq!(&expanded, &units);
    }

    #[test]
    fn tables_never_panic(base in any::<u64>(), stride in any::<u64>(), blocks in any::<u32>(), split in any::<u32>(), len in any::<u64>()) {
        let span = Span { base, stride, blocks, split, device: 0 };
        let segment = Segment { name: String::new(), len, local: span, remote: span, groups: vec![], take: Take::All };
        // Accepted means that the last byte has an address, in arithmetic that cannot overflow.
        if Table::new(std::slice::from_ref(&segment), Side::Remote).is_ok() && blocks > 0 {
            let last = u128::from(base) + u128::from(blocks - 1) * u128::from(stride) + u128::from(split) * u128::from(len);
            prop_assert!(last <= 1 << 64);
            prop_assert!(u64::from(blocks) * u64::from(split) <= 1 << 31);
        }
    }

    #[test]
    fn pairing_never_panics_and_names_only_listed_blocks(
        plan in plan(),
        local in prop::collection::vec(0..12_u32, 0..8),
        remote in prop::collection::vec(0..12_u32, 0..8),
        tokens in prop::option::of(prop_oneof![0..80_u64, any::<u64>()]),
        first in prop::option::of(prop_oneof![0..6_u32, any::<u32>()]),
    ) {
        let (group, lists) = (plan.groups()[0], [vec![local], vec![remote]]);
        let Ok(pairs) = plan.pair(&lists[0], &lists[1], tokens, Some(&[first])) else { return Ok(()) };
        for (side, list, positions) in
            [(Side::Local, &lists[0][0], group.local), (Side::Remote, &lists[1][0], group.remote)]
        {
            let listed: HashSet<u32> = list
                .iter()
                .filter(|id| positions.null != Some(**id))
                .flat_map(|id| id * positions.units..(id + 1) * positions.units)
                .collect();
            let ids = plan.indices(&pairs, side);
            prop_assert_eq!(ids.len() as u64, pairs.descriptors);
            prop_assert!(ids.iter().all(|id| listed.contains(&u32::try_from(*id).unwrap())));
        }
        prop_assert!(pairs.runs <= pairs.descriptors);
        prop_assert_eq!(pairs.bytes, pairs.descriptors * 8);
    }

    #[test]
    fn every_listed_consumer_unit_is_moved_once_or_reported(
        plan in plan(),
        local in prop::collection::hash_set(0..10_u32, 0..8),
        remote in prop::collection::vec(0..10_u32, 0..8),
        tokens in prop::option::of(0..80_u64),
        first in prop::option::of(0..6_u32),
    ) {
        let (group, side) = (plan.groups()[0], plan.direction().consumer());
        let (consumer, producer) = (vec![Vec::from_iter(local)], vec![remote]);
        let (positions, paired) = match side {
            Side::Local => (group.local, plan.pair(&consumer, &producer, tokens, Some(&[first]))),
            Side::Remote => (group.remote, plan.pair(&producer, &consumer, tokens, Some(&[first]))),
        };
        let Ok(pairs) = paired else { return Ok(()) };
        let mut units: Vec<u32> = plan.indices(&pairs, side).iter().map(|id| u32::try_from(*id).unwrap()).collect();
        units.extend(pairs.groups[0].unmoved.iter().flat_map(|range| range.first..range.first + range.len));
        let units_of = |id: &u32| id * positions.units..(id + 1) * positions.units;
        let mut listed: Vec<u32> =
            consumer[0].iter().filter(|id| positions.null != Some(**id)).flat_map(units_of).collect();
        units.sort_unstable();
        listed.sort_unstable();
        prop_assert_eq!(units, listed);
    }
}
