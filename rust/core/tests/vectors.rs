//! The golden vectors, without Python. `tests/test_vectors.py` runs the same file through the public interface.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::expect_used, clippy::panic, missing_docs)]

use nixl_fast_core::{Direction, Error, Group, Ids, Order, Plan, Positions, Segment, Side, Span, Take, expand};
use serde_json::Value;

const UNIT_BYTES: u64 = 16;

fn vectors(section: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("../../../tests/vectors.json")).unwrap();
    all[section].as_array().unwrap().clone()
}

/// `[1, "4..6"]` is 1, 4, 5.
fn numbers(value: &Value) -> Vec<u32> {
    let one = |item: &Value| match item.as_str().map(|text| text.split_once("..").unwrap()) {
        Some((first, end)) => (first.parse().unwrap()..end.parse().unwrap()).collect(),
        None => vec![u32::try_from(item.as_u64().unwrap()).unwrap()],
    };
    value.as_array().unwrap().iter().flat_map(one).collect()
}

fn lists(value: &Value) -> Vec<Vec<u32>> {
    value.as_array().unwrap().iter().map(numbers).collect()
}

fn field(group: &Value, name: &str, default: u32) -> u32 {
    group[name].as_u64().map_or(default, |value| u32::try_from(value).unwrap())
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn plan(case: &Value) -> Plan {
    let direction = if case["direction"] == "write" { Direction::Write } else { Direction::Read };
    let sides = [&case["local"], &case["remote"]];
    let kinds: Vec<[&Value; 2]> = sides[0]["groups"]
        .as_array()
        .unwrap()
        .iter()
        .zip(sides[1]["groups"].as_array().unwrap())
        .map(|(local, remote)| [local, remote])
        .collect();
    let (mut groups, mut segments) = (Vec::new(), Vec::new());
    for (index, pair) in kinds.iter().enumerate() {
        let slots = pair[0]["kind"] == "mamba";
        let kernel = pair.map(|group| field(group, "block", 0) / field(group, "ratio", 1));
        let unit = gcd(kernel[0], kernel[1]);
        let positions = [0, 1].map(|side| Positions {
            block_tokens: field(pair[side], "block", 0),
            units: if slots { 1 } else { field(pair[side], "block", 0) / unit },
            limit: field(sides[side], "blocks", 64),
            null: sides[side]["null"].as_u64().map(|id| u32::try_from(id).unwrap()),
            pages: 1,
            ranks: 1,
            rank: 0,
        });
        let spans = positions.map(|positions| Span {
            base: 4096,
            stride: UNIT_BYTES * u64::from(positions.units),
            blocks: positions.limit,
            split: positions.units,
            device: 0,
        });
        groups.push(Group {
            order: match pair[0]["window"].as_u64() {
                _ if slots => Order::Slots,
                Some(tokens) => Order::Window { tokens: u32::try_from(tokens).unwrap() },
                None => Order::Start,
            },
            unit_tokens: unit,
            local: positions[0],
            remote: positions[1],
        });
        segments.push(Segment {
            name: format!("region {index}"),
            len: UNIT_BYTES,
            local: spans[0],
            remote: spans[1],
            groups: vec![index],
            take: Take::All,
        });
    }
    Plan::new(direction, groups, segments, vec![]).unwrap()
}

#[test]
fn expansion_follows_the_vectors() {
    for case in vectors("expand") {
        for (index, ids) in lists(&case["ids"]).iter().enumerate() {
            let mamba = case["kinds"][index] == "mamba";
            let ratio = case["ratio"].as_u64().or_else(|| case["ratio"][index].as_u64()).unwrap();
            let ratio = if mamba { 1 } else { u32::try_from(ratio).unwrap() };
            let width = if mamba { 1 } else { field(&case, "width", ratio) };
            let out = expand(ids, ratio, width, Ids { side: None, group: Some(index) }).unwrap();
            let out: Vec<u32> = out.into_iter().map(|id| u32::try_from(id).unwrap()).collect();
            assert_eq!(out, numbers(&case["expect"][index]), "{}", case["id"]);
        }
    }
}

#[test]
fn pairing_follows_the_vectors() {
    for case in vectors("pair") {
        let plan = plan(&case);
        let computed: Option<Vec<Option<u32>>> = case["computed"]
            .as_array()
            .map(|list| list.iter().map(|count| count.as_u64().map(|count| u32::try_from(count).unwrap())).collect());
        let (local, remote) = (lists(&case["local_ids"]), lists(&case["remote_ids"]));
        let result = plan.pair(&local, &remote, case["num_tokens"].as_u64(), computed.as_deref());
        if let Some(words) = case["error"].as_array() {
            let error = result.expect_err(case["id"].as_str().unwrap());
            assert!(matches!(error, Error::Pairing { .. }), "{}: {error}", case["id"]);
            for word in words {
                assert!(error.to_string().contains(word.as_str().unwrap()), "{}: {word} in {error}", case["id"]);
            }
            continue;
        }
        let pairs = result.unwrap_or_else(|error| panic!("{}: {error}", case["id"]));
        let mut starts = [0, 0];
        let mut expected = [Vec::new(), Vec::new()];
        for (index, expect) in case["expect"].as_array().unwrap().iter().enumerate() {
            let group = &pairs.groups[index];
            let units = |first: fn(&nixl_fast_core::Run) -> u32| -> Vec<u32> {
                group.all().flat_map(|run| first(run)..first(run) + run.len).collect()
            };
            assert_eq!(units(|run| run.local), numbers(&expect["local"]), "{} local", case["id"]);
            assert_eq!(units(|run| run.remote), numbers(&expect["remote"]), "{} remote", case["id"]);
            let rest: Vec<u32> = group.unmoved.iter().flat_map(|range| range.first..range.first + range.len).collect();
            assert_eq!(rest, numbers(&expect["rest"]), "{} rest", case["id"]);
            for (at, side) in ["local", "remote"].into_iter().enumerate() {
                expected[at]
                    .extend(numbers(&expect[side]).iter().map(|unit| i32::try_from(unit + starts[at]).unwrap()));
            }
            let positions = [plan.groups()[index].local, plan.groups()[index].remote];
            starts = [0, 1].map(|at| starts[at] + positions[at].limit * positions[at].units);
        }
        assert_eq!(plan.indices(&pairs, Side::Local), expected[0], "{}", case["id"]);
        assert_eq!(plan.indices(&pairs, Side::Remote), expected[1], "{}", case["id"]);
        assert_eq!(pairs.descriptors, expected[0].len() as u64);
        assert_eq!(pairs.bytes, UNIT_BYTES * pairs.descriptors);
        if let Some(runs) = case["runs"].as_u64() {
            assert_eq!(pairs.runs, runs, "{}", case["id"]);
        }
        assert_eq!(pairs.descriptors == 0, case["notify_only"] == true, "{}", case["id"]);
    }
}
