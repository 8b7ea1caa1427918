//! Pairing and index writing without Python: `cargo bench -p nixl-fast-core`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use nixl_fast_core::{Direction, Group, Ids, Order, Plan, Positions, Segment, Side, Span, Take, expand};

const POOL: u32 = 20_000;

/// Two engines alike, with `ratio` kernel blocks of 16 tokens per logical block and padded pages.
fn plan(ratio: u32, regions: u64) -> Plan {
    let positions =
        Positions { block_tokens: 16 * ratio, units: ratio, limit: POOL, null: None, pages: ratio, ranks: 1, rank: 0 };
    let group = Group { order: Order::Start, unit_tokens: 16, local: positions, remote: positions };
    let segments = (0..regions)
        .map(|region| {
            let span = Span { base: (region + 1) << 40, stride: 4160, blocks: POOL * ratio, split: 1, device: 0 };
            let name = format!("region {region}");
            Segment { name, len: 4096, local: span, remote: span, groups: vec![0], take: Take::All }
        })
        .collect();
    Plan::new(Direction::Read, vec![group], segments, vec![]).unwrap()
}

/// Block ids as a pool leaves them: ascending, or jumping about without a repetition.
fn blocks(count: u32, fragmented: bool, shift: u32) -> Vec<u32> {
    (0..count).map(|i| if fragmented { (i * 7919 + shift) % POOL } else { i + shift }).collect()
}

fn pairing(criterion: &mut Criterion) {
    for (name, ratio, regions, count) in [
        ("one group, 16 blocks", 1, 1, 16),
        ("32 regions, 64 blocks", 1, 32, 64),
        ("llama 70b 8k tokens", 1, 160, 512),
        ("llama 70b 128k tokens", 1, 160, 8192),
        ("llama 70b 128k tokens, ratio 4", 4, 160, 2048),
    ] {
        let plan = plan(ratio, regions);
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::Elements(u64::from(count * ratio) * regions));
        for fragmented in [false, true] {
            let (local, remote) = (vec![blocks(count, fragmented, 1)], vec![blocks(count, fragmented, 5)]);
            let tokens = Some(u64::from(16 * ratio * count));
            let label = if fragmented { "fragmented" } else { "contiguous" };
            group.bench_function(format!("pair, {label}"), |bencher| {
                bencher.iter(|| plan.pair(black_box(&local), black_box(&remote), tokens, None).unwrap());
            });
            let pairs = plan.pair(&local, &remote, tokens, None).unwrap();
            group.bench_function(format!("write indices, {label}"), |bencher| {
                let make = || vec![0_i32; usize::try_from(pairs.descriptors).unwrap()];
                bencher.iter_batched_ref(
                    make,
                    |out| plan.write_indices(&pairs, Side::Local, out),
                    BatchSize::LargeInput,
                );
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
