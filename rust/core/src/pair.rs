//! What one request moves: two sides' logical block ids to paired units, and to descriptor indices.
//!
//! Positions are absolute: unit `i` of a group holds tokens `i * unit_tokens ..` of the sequence, on both sides. Work is
//! done on runs of units that ascend by one on both sides, kernel ids are never materialised.

use std::cmp::{max, min};
use std::ops::Range;

use crate::error::{Error, Ids, Result, Side};
use crate::expand::check_below;
use crate::table::{MAX_DESCRIPTORS, Segment, Span, Table};

/// A sequence holds fewer tokens; far beyond any model and far below where positions could overflow.
const MAX_TOKENS: u64 = 1 << 48;

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The local rank is the consumer and pulls.
    Read,
    /// The local rank is the producer and pushes.
    Write,
}

impl Direction {
    /// The consumer's side.
    #[must_use]
    pub fn consumer(self) -> Side {
        match self {
            Self::Read => Side::Local,
            Self::Write => Side::Remote,
        }
    }

    /// The producer's side.
    #[must_use]
    pub fn producer(self) -> Side {
        match self {
            Self::Read => Side::Remote,
            Self::Write => Side::Local,
        }
    }
}

/// How a group's list of blocks lies in the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Block `i` holds the `i`-th span of tokens; the producer lists the whole sequence.
    Start,
    /// As `Start`, but only the last `tokens` tokens are wanted and lists may be clipped to their tail.
    Window {
        /// Sliding window in tokens.
        tokens: u32,
    },
    /// Indivisible state slots without token positions (Mamba); lists end at the same slot.
    Slots,
}

/// One side of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// Tokens per logical block.
    pub block_tokens: u32,
    /// Units per logical block.
    pub units: u32,
    /// Logical blocks; every id is below it.
    pub limit: u32,
    /// Id of the placeholder that stands for "no block here".
    pub null: Option<u32>,
    /// Kernel blocks per logical block, for ids of different groups that live in the same memory.
    pub pages: u32,
    /// Groups with the same number share memory on this side.
    pub pool: usize,
}

/// One group of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// How its lists lie in the sequence.
    pub order: Order,
    /// Tokens per unit; a slot is one unit whatever this says.
    pub unit_tokens: u32,
    /// This rank.
    pub local: Positions,
    /// The peer.
    pub remote: Positions,
}

impl Group {
    fn on(&self, side: Side) -> &Positions {
        match side {
            Side::Local => &self.local,
            Side::Remote => &self.remote,
        }
    }
}

/// `len` units that ascend by one on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First local unit.
    pub local: u32,
    /// First remote unit.
    pub remote: u32,
    /// Number of units.
    pub len: u32,
}

impl Run {
    fn on(&self, side: Side) -> u32 {
        match side {
            Side::Local => self.local,
            Side::Remote => self.remote,
        }
    }
}

/// `len` consecutive consumer units that get no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmoved {
    /// First unit.
    pub first: u32,
    /// Number of units.
    pub len: u32,
}

/// What one group of one request moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupPairs {
    /// Paired units, in the order of the consumer's list.
    pub runs: Vec<Run>,
    /// Listed consumer units that get no data.
    pub unmoved: Vec<Unmoved>,
}

impl GroupPairs {
    fn move_unit(&mut self, direction: Direction, consumer: u32, producer: u32, len: u32) {
        let (local, remote) = match direction {
            Direction::Read => (consumer, producer),
            Direction::Write => (producer, consumer),
        };
        match self.runs.last_mut() {
            Some(run) if run.local + run.len == local && run.remote + run.len == remote => run.len += len,
            _ => self.runs.push(Run { local, remote, len }),
        }
    }

    fn leave(&mut self, first: u32, len: u32) {
        match self.unmoved.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.first + last.len == first => last.len += len,
            _ => self.unmoved.push(Unmoved { first, len }),
        }
    }

    /// Number of paired units.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.len)).sum()
    }
}

/// What one request moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairs {
    /// One entry per group of the plan.
    pub groups: Vec<GroupPairs>,
    /// Descriptors on each side.
    pub descriptors: u64,
    /// Descriptors left after neighbours that are dense on both sides are merged.
    pub runs: u64,
    /// Bytes moved.
    pub bytes: u64,
}

/// Everything about two ranks that does not depend on a request, checked once.
#[derive(Clone, Debug)]
pub struct Plan {
    direction: Direction,
    groups: Vec<Group>,
    segments: Vec<Segment>,
    local: Table,
    remote: Table,
}

impl Plan {
    /// Checks the numbers and numbers the descriptors.
    pub fn new(direction: Direction, groups: Vec<Group>, segments: Vec<Segment>) -> Result<Self> {
        let local = Table::new(&segments, Side::Local)?;
        let remote = Table::new(&segments, Side::Remote)?;
        for (index, group) in groups.iter().enumerate() {
            let invalid = |what: &str, value: u32| {
                let what = format!("group {index}: {what}");
                Err(Error::Invalid { what, value: value.into(), rule: "1 or more".to_owned() })
            };
            if group.unit_tokens == 0 {
                return invalid("unit_tokens", group.unit_tokens);
            }
            for side in [Side::Local, Side::Remote] {
                let positions = group.on(side);
                for (what, value) in [
                    ("block_tokens", positions.block_tokens),
                    ("units per block", positions.units),
                    ("pages per block", positions.pages),
                ] {
                    if value == 0 {
                        return invalid(what, value);
                    }
                }
                if group.order != Order::Slots
                    && u64::from(positions.units) * u64::from(group.unit_tokens) != positions.block_tokens.into()
                {
                    let rule = format!("{} units of {} tokens", positions.units, group.unit_tokens);
                    return Err(Error::Invalid {
                        what: format!("group {index}: {side} block_tokens"),
                        value: positions.block_tokens.into(),
                        rule,
                    });
                }
                for (what, per_block) in [("units", positions.units), ("pages", positions.pages)] {
                    let value = u64::from(positions.limit) * u64::from(per_block);
                    if value > MAX_DESCRIPTORS {
                        return Err(Error::Invalid {
                            what: format!("group {index}: {side} {what}"),
                            value,
                            rule: "at most 2^31".to_owned(),
                        });
                    }
                }
                if groups.get(positions.pool).is_none_or(|first| first.on(side).pool != positions.pool) {
                    let rule = "the first group that shares its memory".to_owned();
                    return Err(Error::Invalid {
                        what: format!("group {index}: {side} pool"),
                        value: positions.pool as u64,
                        rule,
                    });
                }
                // Every unit of every id below the limit has a descriptor in every segment of the group.
                let units = u64::from(positions.limit) * u64::from(positions.units);
                for segment in segments.iter().filter(|segment| segment.groups.contains(&index)) {
                    let count = segment.span(side).count();
                    if units > count {
                        let what = format!("group {index}: {side} units");
                        let rule = format!("at most the {count} descriptors of {}", segment.name);
                        return Err(Error::Invalid { what, value: units, rule });
                    }
                }
            }
        }
        if let Some(bad) = segments.iter().flat_map(|segment| &segment.groups).find(|group| **group >= groups.len()) {
            let rule = format!("below the {} groups", groups.len());
            return Err(Error::Invalid { what: "group of a segment".to_owned(), value: *bad as u64, rule });
        }
        Ok(Self { direction, groups, segments, local, remote })
    }

    /// Who moves the bytes.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The groups, in order.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Exclusive upper bound of a group's logical block ids.
    #[must_use]
    pub fn limit(&self, side: Side, group: usize) -> u32 {
        self.groups.get(group).map_or(0, |group| group.on(side).limit)
    }

    /// The descriptor list of `side`.
    #[must_use]
    pub fn table(&self, side: Side) -> &Table {
        match side {
            Side::Local => &self.local,
            Side::Remote => &self.remote,
        }
    }

    /// The segments, in descriptor order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Pairs one request. `local` and `remote` hold one list of logical block ids per group.
    ///
    /// `tokens` is how many tokens' KV the producer holds. `computed[g]` is the logical index, in the sequence, of the
    /// consumer's first listed block.
    pub fn pair(
        &self,
        local: &[Vec<u32>],
        remote: &[Vec<u32>],
        tokens: Option<u64>,
        computed: Option<&[Option<u32>]>,
    ) -> Result<Pairs> {
        for (side, lists) in [(Side::Local, local), (Side::Remote, remote)] {
            if lists.len() != self.groups.len() {
                return Err(Error::GroupCount { side, got: lists.len(), expected: self.groups.len() });
            }
            for (index, (list, group)) in lists.iter().zip(&self.groups).enumerate() {
                let positions = group.on(side);
                check_ids(list, positions, Ids { side: Some(side), group: Some(index) })?;
            }
        }
        if let Some(computed) = computed.filter(|computed| computed.len() != self.groups.len()) {
            return Err(Error::ComputedCount { got: computed.len(), expected: self.groups.len() });
        }
        let (consumers, producers) = match self.direction {
            Direction::Read => (local, remote),
            Direction::Write => (remote, local),
        };
        self.check_writers(consumers)?;
        let mut groups = Vec::with_capacity(self.groups.len());
        for (index, (group, (consumer, producer))) in
            self.groups.iter().zip(consumers.iter().zip(producers)).enumerate()
        {
            let first = computed.and_then(|computed| computed.get(index).copied().flatten());
            let request = Request { group, direction: self.direction, consumer, producer, tokens, first };
            groups.push(request.pair().map_err(|reason| Error::Pairing { group: index, reason })?);
        }
        Ok(self.count(groups))
    }

    /// Descriptor indices of `side`: ascending by segment, inside a segment in list order.
    #[must_use]
    pub fn indices(&self, pairs: &Pairs, side: Side) -> Vec<i32> {
        let mut out = Vec::with_capacity(pairs.descriptors as usize);
        for (segment, start) in self.segments.iter().zip(self.table(side).starts()) {
            for group in segment.groups.iter().filter_map(|group| pairs.groups.get(*group)) {
                for run in &group.runs {
                    let first = start + run.on(side);
                    out.extend((first..first + run.len).map(|id| id as i32));
                }
            }
        }
        out
    }

    /// Refuses an id that the consumer lists twice, in one group or in two that share memory.
    fn check_writers(&self, consumers: &[Vec<u32>]) -> Result<()> {
        let side = self.direction.consumer();
        let lists = || self.groups.iter().map(|group| group.on(side)).zip(consumers).enumerate();
        for (pool, _) in lists().filter(|(index, (positions, _))| positions.pool == *index) {
            let members = || lists().filter(|(_, (positions, list))| positions.pool == pool && !list.is_empty());
            if members().count() < 2 && members().all(|(_, (_, list))| list.is_sorted_by(|a, b| a < b)) {
                continue;
            }
            let pages = |positions: &Positions, id: u32| {
                let first = u64::from(id) * u64::from(positions.pages);
                first..first + u64::from(positions.pages)
            };
            let bits: u64 = members()
                .map(|(_, (positions, _))| u64::from(positions.limit) * u64::from(positions.pages))
                .max()
                .unwrap_or(0);
            let mut seen = vec![0_u64; bits.div_ceil(64) as usize];
            for (group, (positions, list)) in members() {
                for (position, &value) in list.iter().enumerate().filter(|(_, id)| positions.null != Some(**id)) {
                    for page in pages(positions, value) {
                        let Some(word) = seen.get_mut((page / 64) as usize) else { continue };
                        if *word & (1 << (page % 64)) != 0 {
                            let ids = Ids { side: Some(side), group: Some(group) };
                            // Only now, on the way out, is it worth finding the first of the two.
                            let first = members().find_map(|(index, (other, list))| {
                                let holds = |id: &u32| other.null != Some(*id) && pages(other, *id).contains(&page);
                                list.iter().position(holds).map(|at| (index, at))
                            });
                            let (first_group, first_position) = first.unwrap_or((group, position));
                            return Err(Error::IdRepeated { ids, position, value, first_group, first_position });
                        }
                        *word |= 1 << (page % 64);
                    }
                }
            }
        }
        Ok(())
    }

    fn count(&self, groups: Vec<GroupPairs>) -> Pairs {
        let (mut descriptors, mut runs, mut bytes) = (0, 0, 0);
        let units: Vec<u64> = groups.iter().map(GroupPairs::units).collect();
        for segment in &self.segments {
            for &index in &segment.groups {
                let (Some(group), Some(units)) = (groups.get(index), units.get(index)) else { continue };
                descriptors += units;
                bytes += units * segment.len;
                runs += merged(segment, &group.runs);
            }
        }
        Pairs { groups, descriptors, runs, bytes }
    }
}

/// Descriptors that remain of `runs` in `segment` once neighbours are merged.
fn merged(segment: &Segment, runs: &[Run]) -> u64 {
    let gaps = |span: &Span| if span.is_dense(segment.len) { None } else { Some(span.split) };
    let pieces = |first: u32, len: u32, split: u32| u64::from((first + len - 1) / split - first / split) + 1;
    match (gaps(&segment.local), gaps(&segment.remote)) {
        (None, None) => runs.len() as u64,
        (Some(1), _) | (_, Some(1)) => runs.iter().map(|run| u64::from(run.len)).sum(),
        (Some(split), None) => runs.iter().map(|run| pieces(run.local, run.len, split)).sum(),
        (None, Some(split)) => runs.iter().map(|run| pieces(run.remote, run.len, split)).sum(),
        (Some(local), Some(remote)) => {
            let starts = |run: &Run| {
                let inner = (1..run.len)
                    .filter(|i| (run.local + i).is_multiple_of(local) || (run.remote + i).is_multiple_of(remote));
                1 + inner.count() as u64
            };
            runs.iter().map(starts).sum()
        }
    }
}

/// Refuses an id that names no block; a placeholder names none and need not.
fn check_ids(list: &[u32], positions: &Positions, ids: Ids) -> Result<()> {
    match positions.null {
        Some(null) if null >= positions.limit => {
            let bad = list.iter().enumerate().find(|(_, id)| **id >= positions.limit && **id != null);
            bad.map_or(Ok(()), |(position, id)| {
                Err(Error::IdTooLarge { ids, position, value: id.to_string(), limit: positions.limit.into() })
            })
        }
        _ => check_below(list, positions.limit.into(), ids),
    }
}

/// One group of one request.
struct Request<'a> {
    group: &'a Group,
    direction: Direction,
    consumer: &'a [u32],
    producer: &'a [u32],
    tokens: Option<u64>,
    first: Option<u32>,
}

/// Where both lists lie, in units.
struct Placed {
    /// Position of the consumer's first listed unit.
    consumer: u64,
    /// Position of the producer's first listed unit.
    producer: u64,
    /// First position that each side keeps after clipping to the window.
    kept: (u64, u64),
    /// First position without which the consumer cannot go on.
    needed: u64,
    /// First position past the data.
    end: u64,
}

impl Request<'_> {
    fn pair(&self) -> std::result::Result<GroupPairs, String> {
        if self.consumer.is_empty() {
            return Ok(GroupPairs::default());
        }
        match self.group.order {
            Order::Slots => self.slots(),
            Order::Start | Order::Window { .. } => self.by_position(&self.place()?),
        }
    }

    fn sides(&self) -> (&Positions, &Positions) {
        (self.group.on(self.direction.consumer()), self.group.on(self.direction.producer()))
    }

    /// Both lists' places in the sequence, or why they are not certain.
    fn place(&self) -> std::result::Result<Placed, String> {
        let (consumer, producer) = self.sides();
        let (listed_c, listed_p) = (self.consumer.len() as u64, self.producer.len() as u64);
        let (units_c, units_p) = (u64::from(consumer.units), u64::from(producer.units));
        let (tokens_c, tokens_p) = (u64::from(consumer.block_tokens), u64::from(producer.block_tokens));
        let window = match self.group.order {
            Order::Window { tokens } => Some(u64::from(tokens)),
            Order::Start | Order::Slots => None,
        };
        // First block that a list clipped to the window keeps, of `blocks` up to the end of the data.
        let kept = |blocks: u64, size: u64| window.map_or(0, |window| blocks.saturating_sub(window.div_ceil(size) + 1));
        if let Some(tokens) = self.tokens {
            if tokens >= MAX_TOKENS {
                return Err(format!("num_tokens is {tokens}, it must be below 2^48"));
            }
            let (blocks_c, blocks_p) = (tokens.div_ceil(tokens_c), tokens.div_ceil(tokens_p));
            let first_c = match self.first {
                Some(first) => u64::from(first),
                None => blocks_c.checked_sub(listed_c).ok_or_else(|| {
                    format!(
                        "consumer lists {listed_c} blocks of {tokens_c} tokens but {tokens} tokens need {blocks_c}; \
                         pass num_computed_blocks to place them (producer lists {listed_p})"
                    )
                })?,
            };
            let first_p = match window {
                Some(_) => blocks_p.checked_sub(listed_p),
                None if listed_p >= blocks_p => Some(0),
                None => None,
            };
            let first_p = first_p.ok_or_else(|| {
                format!(
                    "producer lists {listed_p} blocks of {tokens_p} tokens but {tokens} tokens need {blocks_p} \
                     (consumer lists {listed_c})"
                )
            })?;
            return Ok(Placed {
                consumer: first_c * units_c,
                producer: first_p * units_p,
                kept: (kept(blocks_c, tokens_c) * units_c, kept(blocks_p, tokens_p) * units_p),
                needed: window.map_or(0, |window| tokens.saturating_sub(window)) / u64::from(self.group.unit_tokens),
                end: tokens.div_ceil(self.group.unit_tokens.into()),
            });
        }
        if tokens_c == tokens_p {
            // Both lists end with the block that holds the last token.
            let blocks = match self.first {
                Some(first) => u64::from(first) + listed_c,
                None => max(listed_c, listed_p),
            };
            let first_p = blocks.checked_sub(listed_p);
            let first_p = first_p.filter(|first| self.first.is_none() || window.is_some() || *first == 0);
            let first_p = first_p.ok_or_else(|| {
                format!(
                    "consumer lists {listed_c} blocks from block {} on, producer lists {listed_p} of the same size; they do \
                     not end together, pass num_tokens",
                    blocks - listed_c
                )
            })?;
            let kept = kept(blocks, tokens_c);
            return Ok(Placed {
                consumer: (blocks - listed_c) * units_c,
                producer: first_p * units_p,
                kept: (kept * units_c, kept * units_p),
                needed: kept * units_c,
                end: blocks * units_c,
            });
        }
        let counts =
            format!("consumer lists {listed_c} blocks of {tokens_c} tokens, producer {listed_p} of {tokens_p}");
        if window.is_some() || self.first != Some(0) {
            return Err(format!("{counts}: without num_tokens their positions are unknown, pass num_tokens"));
        }
        // Nothing is cached, so both start at token 0; the counts must be those of one sequence.
        let (end_c, end_p) = (listed_c * units_c, listed_p * units_p);
        if (end_c - units_c) >= end_p || end_p.saturating_sub(units_p) >= end_c {
            return Err(format!("{counts}: the counts differ by more than the last block, pass num_tokens"));
        }
        Ok(Placed { consumer: 0, producer: 0, kept: (0, 0), needed: 0, end: min(end_c, end_p) })
    }

    /// Moves the intersection, unit by unit at the same position.
    fn by_position(&self, placed: &Placed) -> std::result::Result<GroupPairs, String> {
        let (consumer, producer) = self.sides();
        let (units_c, units_p) = (consumer.units, producer.units);
        let listed = |first: u64, list: &[u32], units: u32| first..first + list.len() as u64 * u64::from(units);
        let consumer_range = listed(placed.consumer, self.consumer, units_c);
        let producer_range = listed(placed.producer, self.producer, units_p);
        let covered = max(producer_range.start, placed.kept.1)..producer_range.end;
        let wanted = max(consumer_range.start, placed.kept.0)..min(consumer_range.end, placed.end);
        let needed = max(wanted.start, placed.needed)..wanted.end;
        let uncovered = |at: u64| {
            let (size, unit) = (consumer.block_tokens, u64::from(self.group.unit_tokens));
            format!(
                "consumer block at position {} (sequence tokens from {}, {size} a block) has no producer block: consumer \
                 lists {} blocks, producer {}",
                at.saturating_sub(placed.consumer) / u64::from(units_c),
                at * unit,
                self.consumer.len(),
                self.producer.len()
            )
        };
        if needed.start < needed.end && (needed.start < covered.start || needed.end > covered.end) {
            let at = if needed.start < covered.start { needed.start } else { max(needed.start, covered.end) };
            return Err(uncovered(at));
        }
        let moved = max(wanted.start, covered.start)..min(wanted.end, covered.end);
        let mut out = GroupPairs::default();
        let mut at = consumer_range.start;
        for &block in self.consumer {
            let end = at + u64::from(units_c);
            if consumer.null == Some(block) {
                at = end;
                continue;
            }
            let first = block * units_c;
            let inside = clamp(&moved, at, end);
            out.leave(first, (inside.start - at) as u32);
            let (mut from, mut unit) = (inside.start, first + (inside.start - at) as u32);
            while from < inside.end {
                let offset = from - producer_range.start;
                let (index, part) = ((offset / u64::from(units_p)) as usize, (offset % u64::from(units_p)) as u32);
                let len = min(units_p - part, (inside.end - from) as u32);
                match self.producer.get(index) {
                    Some(id) if producer.null != Some(*id) => {
                        out.move_unit(self.direction, unit, id * units_p + part, len);
                    }
                    _ if from + u64::from(len) > placed.needed => return Err(uncovered(from)),
                    _ => out.leave(unit, len),
                }
                from += u64::from(len);
                unit += len;
            }
            out.leave(unit, (end - max(from, at)) as u32);
            at = end;
        }
        Ok(out)
    }

    /// Pairs state slots from the end of both lists.
    fn slots(&self) -> std::result::Result<GroupPairs, String> {
        let (consumer, producer) = self.sides();
        let placeholders = self.consumer.iter().take_while(|id| consumer.null == Some(**id)).count();
        let slots = self.consumer.get(placeholders..).unwrap_or_default();
        let (wanted, listed) = (slots.len(), self.producer.len());
        // One slot more than the producer has is the slot that the consumer fills itself.
        let paired = if wanted == listed + 1 && listed > 0 { listed } else { wanted };
        let tail = listed.checked_sub(paired).and_then(|skip| self.producer.get(skip..));
        let tail = tail.ok_or_else(|| {
            format!("consumer has {wanted} state slots, producer {listed}; at most one more than the producer's can be recomputed")
        })?;
        let mut out = GroupPairs::default();
        for (position, (&to, &from)) in
            slots.iter().zip(tail).enumerate().filter(|(_, (to, _))| consumer.null != Some(**to))
        {
            if producer.null == Some(from) {
                return Err(format!(
                    "consumer slot {to} at position {} would be filled from the producer's placeholder {from} at position {} \
                     (consumer has {wanted} state slots, producer lists {listed})",
                    position + placeholders,
                    position + listed - paired
                ));
            }
            out.move_unit(self.direction, to, from, 1);
        }
        for &slot in slots.iter().skip(paired).filter(|slot| consumer.null != Some(**slot)) {
            out.leave(slot, 1);
        }
        Ok(out)
    }
}

/// `range` cut to `start..end`; empty at a bound where they do not meet.
fn clamp(range: &Range<u64>, start: u64, end: u64) -> Range<u64> {
    let first = range.start.clamp(start, end);
    first..range.end.clamp(first, end)
}
