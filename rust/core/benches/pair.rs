//! Pairing and index writing without Python: `cargo bench -p nixl-fast-core`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nixl_fast_core::{Direction, Group, Ids, Order, Plan, Positions, Segment, Side, Span, Take, expand};

const POOL: u32 = 20_000;

/// A request's plan, blocks per group of the consumer and the producer, tokens, and blocks that the consumer has cached.
struct Shape {
    name: &'static str,
    plan: Plan,
    blocks: Vec<(u32, u32)>,
    tokens: u64,
    cached: Option<u32>,
}

fn positions(block_tokens: u32, units: u32, limit: u32) -> Positions {
    Positions { block_tokens, units, limit, null: None, pages: units, ranks: 1, rank: 0 }
}

fn group(order: Order, local: Positions, remote: Positions) -> Group {
    let unit_tokens = if order == Order::Slots { 1 } else { local.block_tokens / local.units };
    Group { order, unit_tokens, local, remote }
}

/// `count` segments from address `first` TiB on; `padded` blocks are named one by one.
fn segments(first: u64, count: u64, units: (u32, u32), groups: &[usize], take: Take, padded: bool) -> Vec<Segment> {
    let each = |region: u64| {
        let span = |units: u32| {
            let scale = if let Take::Whole(scale) = take { scale } else { 1 };
            let stride = if padded { 4160 } else { 4096 };
            Span { base: (first + region + 1) << 40, stride, blocks: POOL * units / scale, split: 1, device: 0 }
        };
        let (name, groups) = (format!("region {region}"), groups.to_vec());
        Segment { name, len: 4096, local: span(units.0), remote: span(units.1), groups, take }
    };
    (0..count).map(each).collect()
}

/// Two engines alike with one group of full attention.
fn dense(name: &'static str, ratio: u32, regions: u64, count: u32, block_tokens: u32) -> Shape {
    let side = positions(block_tokens, ratio, POOL);
    let segments = segments(0, regions, (ratio, ratio), &[0], Take::All, true);
    let plan = Plan::new(Direction::Read, vec![group(Order::Start, side, side)], segments, vec![]).unwrap();
    Shape { name, plan, blocks: vec![(count, count)], tokens: u64::from(block_tokens * count), cached: None }
}

fn gpt_oss() -> Shape {
    let side = positions(16, 1, POOL);
    let groups = vec![group(Order::Start, side, side), group(Order::Window { tokens: 128 }, side, side)];
    let segments = segments(0, 36, (1, 1), &[0, 1], Take::All, true);
    let plan = Plan::new(Direction::Read, groups, segments, vec![vec![0, 1]]).unwrap();
    Shape { name: "gpt-oss 32k tokens", plan, blocks: vec![(2048, 2048), (9, 9)], tokens: 32_768, cached: None }
}

/// Attention in whole logical blocks and what they leave, and three groups of state slots.
fn nemotron() -> Shape {
    let side = positions(16 * 261, 261, 400);
    let slots = positions(16 * 261, 1, 400);
    let groups = [vec![group(Order::Start, side, side)], vec![group(Order::Slots, slots, slots); 3]].concat();
    let parts = [
        segments(0, 8, (261, 261), &[0], Take::Whole(261), false),
        segments(0, 8, (261, 261), &[0], Take::Rest, false),
        segments(64, 32, (1, 1), &[1, 2, 3], Take::All, true),
    ];
    let plan = Plan::new(Direction::Read, groups, parts.concat(), vec![vec![1, 2, 3]]).unwrap();
    let blocks = vec![(60, 60), (1, 1), (1, 1), (1, 1)];
    Shape { name: "nemotron-h, ratio 261", plan, blocks, tokens: 60 * 16 * 261 - 5, cached: None }
}

fn different_blocks() -> Shape {
    let (local, remote) = (positions(64, 4, POOL), positions(16, 1, POOL));
    let segments = segments(0, 160, (4, 1), &[0], Take::All, true);
    let plan = Plan::new(Direction::Read, vec![group(Order::Start, local, remote)], segments, vec![]).unwrap();
    Shape {
        name: "blocks of 64 and 16, a quarter cached",
        plan,
        blocks: vec![(96, 512)],
        tokens: 8192,
        cached: Some(32),
    }
}

/// Block ids as a pool leaves them: ascending, or jumping about without a repetition.
fn blocks(count: u32, fragmented: bool, shift: u32) -> Vec<u32> {
    (0..count).map(|i| if fragmented { (i * 7919 + shift) % POOL } else { i + shift }).collect()
}

fn pairing(criterion: &mut Criterion) {
    for shape in [
        dense("one group, 16 blocks", 1, 1, 16, 16),
        dense("32 regions, 64 blocks", 1, 32, 64, 16),
        dense("llama 70b 8k tokens", 1, 160, 512, 16),
        dense("llama 70b 128k tokens", 1, 160, 8192, 16),
        dense("llama 70b 128k tokens, ratio 4", 4, 160, 2048, 64),
        gpt_oss(),
        nemotron(),
        dense("deepseek v3 32k tokens", 1, 61, 512, 64),
        different_blocks(),
    ] {
        let plan = &shape.plan;
        let mut group = criterion.benchmark_group(shape.name);
        for fragmented in [false, true] {
            let mut next = 1;
            let (mut local, mut remote) = (vec![], vec![]);
            for (index, &(consumer, producer)) in shape.blocks.iter().enumerate() {
                let of = |count, limit, shift| blocks(count, fragmented && limit == POOL, next + shift);
                local.push(of(consumer, plan.limit(Side::Local, index), 0));
                remote.push(of(producer, plan.limit(Side::Remote, index), 4));
                next += consumer.max(producer);
            }
            let computed: Option<Vec<_>> = shape.cached.map(|cached| vec![Some(cached); shape.blocks.len()]);
            let pair = || plan.pair(black_box(&local), black_box(&remote), Some(shape.tokens), computed.as_deref());
            let pairs = pair().unwrap();
            group.throughput(Throughput::Elements(pairs.descriptors));
            let label = if fragmented { "fragmented" } else { "contiguous" };
            group.bench_function(format!("pair, {label}"), |bencher| bencher.iter(|| pair().unwrap()));
            let mut out = vec![0_i32; usize::try_from(pairs.descriptors).unwrap()];
            group.bench_function(format!("write indices, {label}"), |bencher| {
                bencher.iter(|| plan.write_indices(&pairs, Side::Local, black_box(&mut out)));
            });
        }
        group.finish();
    }
}

fn expansion(criterion: &mut Criterion) {
    for ratio in [4, 261] {
        let blocks = blocks(2048, true, 3);
        let mut group = criterion.benchmark_group(format!("expand 2048 blocks, ratio {ratio}"));
        group.throughput(Throughput::Elements(2048 * u64::from(ratio)));
        group.bench_function("expand", |bencher| {
            bencher.iter(|| expand(black_box(&blocks), ratio, ratio, Ids { side: None, group: None }).unwrap());
        });
        group.finish();
    }
}

criterion_group!(benches, pairing, expansion);
criterion_main!(benches);
