//! What one request moves: two sides' logical block ids to paired units, and to descriptor indices.
//!
//! Positions are absolute: unit `i` of a group holds tokens `i * unit_tokens ..` of the sequence, on both sides. Work is
//! done on runs of units that ascend by one on both sides, kernel ids are never materialised.

use std::cmp::{max, min};
use std::ops::Range;

use crate::error::{Error, Ids, Result, Side, ensure};
use crate::expand::check_below;
use crate::table::{MAX_DESCRIPTORS, Segment, Span, Table, Take};

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
    /// Context parallelism: this rank's block `i` is block `i * ranks + rank` of the sequence.
    pub ranks: u32,
    /// This rank among `ranks`.
    pub rank: u32,
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
    /// Units of the logical block that the data does not fill, kept apart where segments take whole blocks.
    pub partial: Option<Run>,
    /// Listed consumer units that get no data.
    pub unmoved: Vec<Unmoved>,
}

impl GroupPairs {
    fn join(&mut self, next: Run) {
        match self.runs.last_mut() {
            Some(run) if run.local + run.len == next.local && run.remote + run.len == next.remote => {
                run.len += next.len;
            }
            _ => self.runs.push(next),
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
        self.all().map(|run| u64::from(run.len)).sum()
    }

    /// Whether runs are so short that writing them one by one costs more than adding to a pattern.
    fn has_short_runs(&self) -> bool {
        self.units() < 32 * self.runs.len() as u64
    }

    /// Every run, the partial block's last.
    pub fn all(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().chain(&self.partial)
    }

    /// The runs that a segment takes, in the segment's units.
    fn taken(&self, take: Take) -> impl Iterator<Item = Run> {
        let (runs, partial, scale) = match take {
            Take::All => (self.runs.as_slice(), self.partial, 1),
            Take::Whole(scale) => (self.runs.as_slice(), None, scale),
            Take::Rest => (&[][..], self.partial, 1),
        };
        let scaled = move |run: &Run| match scale {
            1 => *run,
            _ => Run { local: run.local / scale, remote: run.remote / scale, len: run.len / scale },
        };
        runs.iter().map(scaled).chain(partial)
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
    sharing: Vec<Vec<usize>>,
    kinds: Vec<Kind>,
    local: Table,
    remote: Table,
    /// Per group, whether a segment takes its logical blocks whole.
    whole: Vec<bool>,
}

impl Plan {
    /// Checks the numbers and numbers the descriptors.
    ///
    /// `sharing` names sets of groups whose blocks lie in the same memory of the consumer, page for page, so that no id
    /// may stand in the lists of two of them; a group may be in several sets.
    pub fn new(
        direction: Direction,
        groups: Vec<Group>,
        segments: Vec<Segment>,
        mut sharing: Vec<Vec<usize>>,
    ) -> Result<Self> {
        let local = Table::new(&segments, Side::Local)?;
        let remote = Table::new(&segments, Side::Remote)?;
        for index in 0..groups.len() {
            check_group(index, &groups, &segments)?;
        }
        for &group in segments.iter().flat_map(|segment| &segment.groups).chain(sharing.iter().flatten()) {
            let rule = || format!("below the {} groups", groups.len());
            ensure(group < groups.len(), || "group of a segment or set".to_owned(), group as u64, rule)?;
        }
        // A group that shares its memory with no other still lists no block twice.
        let alone = (0..groups.len()).filter(|group| !sharing.iter().flatten().any(|each| each == group));
        sharing.extend(alone.map(|group| vec![group]).collect::<Vec<_>>());
        for side in [Side::Local, Side::Remote] {
            let bytes: u128 =
                segments.iter().map(|each| u128::from(each.len) * u128::from(each.span(side).count())).sum();
            let what = || format!("bytes of the {side} list");
            ensure(bytes < 1 << 64, what, u64::MAX, || format!("below 2^64, they are {bytes}"))?;
        }
        let takes_whole = |index: usize| {
            segments.iter().any(|segment| segment.groups.contains(&index) && matches!(segment.take, Take::Whole(_)))
        };
        let whole = (0..groups.len()).map(takes_whole).collect();
        let kinds = Kind::of(&segments);
        Ok(Self { direction, groups, segments, sharing, kinds, local, remote, whole })
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
        let lists = consumers.iter().zip(producers).zip(&self.whole);
        for (index, (group, ((consumer, producer), &whole))) in self.groups.iter().zip(lists).enumerate() {
            let first = computed.and_then(|computed| computed.get(index).copied().flatten());
            let request = Request { group, direction: self.direction, whole, consumer, producer, tokens, first };
            groups.push(request.pair().map_err(|reason| Error::Pairing { group: index, reason })?);
        }
        Ok(self.count(groups))
    }

    /// Descriptor indices of `side`: ascending by segment, inside a segment in list order.
    #[must_use]
    pub fn indices(&self, pairs: &Pairs, side: Side) -> Vec<i32> {
        let mut out = vec![0; pairs.descriptors as usize];
        self.write_indices(pairs, side, &mut out);
        out
    }

    /// Writes what [`Plan::indices`] returns to `out`, which has to hold `pairs.descriptors` indices; returns how many
    /// were written, always from the front.
    ///
    /// Segments of one kind repeat the same units at another start. Long runs are written run by run; short ones are
    /// written once and then, for every further segment, read back with the difference of the starts added.
    pub fn write_indices<S: Slot>(&self, pairs: &Pairs, side: Side, out: &mut [S]) -> usize {
        let mut at = 0;
        let mut patterns: Vec<Option<(Take, Vec<u32>)>> = vec![None; pairs.groups.len()];
        let repeats = self.segments.len() > 1;
        let short: Vec<bool> = pairs.groups.iter().map(|group| repeats && group.has_short_runs()).collect();
        for (segment, &start) in self.segments.iter().zip(self.table(side).starts()) {
            for &index in &segment.groups {
                let (Some(group), Some(pattern)) = (pairs.groups.get(index), patterns.get_mut(index)) else { continue };
                let Some(slots) = out.get_mut(at..) else { return at };
                if segment.take == Take::Rest || !short.get(index).is_some_and(|short| *short) {
                    at += write(slots, group.taken(segment.take), side, start);
                    continue;
                }
                if pattern.as_ref().is_none_or(|(take, _)| *take != segment.take) {
                    let mut units = vec![0_u32; group.taken(segment.take).map(|run| run.len as usize).sum()];
                    write(&mut units, group.taken(segment.take), side, 0);
                    *pattern = Some((segment.take, units));
                }
                if let Some((_, units)) = pattern {
                    // Every sum is an index of the table, checked when the plan was made.
                    slots.iter_mut().zip(&*units).for_each(|(slot, unit)| slot.put(unit.wrapping_add(start)));
                    at += units.len().min(slots.len());
                }
            }
        }
        at
    }

    /// Refuses an id that the consumer lists twice, in one group or in two that share memory.
    fn check_writers(&self, consumers: &[Vec<u32>]) -> Result<()> {
        let side = self.direction.consumer();
        for set in &self.sharing {
            let member = |&index: &usize| Some((index, (self.groups.get(index)?.on(side), consumers.get(index)?)));
            let members = || set.iter().filter_map(member).filter(|(_, (_, list))| !list.is_empty());
            if members().count() < 2 && members().all(|(_, (_, list))| list.is_sorted_by(|a, b| a < b)) {
                continue;
            }
            let bits: u64 = members()
                .map(|(_, (positions, _))| u64::from(positions.limit) * u64::from(positions.pages))
                .max()
                .unwrap_or(0);
            let mut seen = vec![0_u64; bits.div_ceil(64) as usize];
            for (group, (positions, list)) in members() {
                for (position, &value) in list.iter().enumerate().filter(|(_, id)| positions.null != Some(**id)) {
                    if let Some(page) = claim(&mut seen, pages(positions, value)) {
                        return Err(twice(side, (group, position, value), members(), page));
                    }
                }
            }
        }
        Ok(())
    }

    fn count(&self, groups: Vec<GroupPairs>) -> Pairs {
        let (mut descriptors, mut runs, mut bytes) = (0, 0, 0);
        for kind in &self.kinds {
            let taken = || {
                let groups = kind.groups.iter().filter_map(|index| groups.get(*index));
                groups.flat_map(|group| group.taken(kind.shape.take))
            };
            let units: u64 = taken().map(|run| u64::from(run.len)).sum();
            descriptors += units * kind.segments;
            bytes += units * kind.len;
            runs += kind.shape.pieces(taken()) * kind.segments;
        }
        Pairs { groups, descriptors, runs, bytes }
    }
}

/// What every later step relies on: no zero size, no unit without a descriptor, nothing past 2^31.
fn check_group(index: usize, groups: &[Group], segments: &[Segment]) -> Result<()> {
    let Some(group) = groups.get(index) else { return Ok(()) };
    let slots = group.order == Order::Slots;
    for side in [Side::Local, Side::Remote] {
        let at = group.on(side);
        let (units, tokens, limit) = (u64::from(at.units), u64::from(at.block_tokens), u64::from(at.limit));
        let check = |what: &str, value: u64, ok: bool, rule: &dyn Fn() -> String| {
            ensure(ok, || format!("group {index}: {side} {what}"), value, rule)
        };
        for (what, value) in
            [("block_tokens", tokens), ("units", units), ("pages", at.pages.into()), ("ranks", at.ranks.into())]
        {
            check(what, value, value > 0, &|| "1 or more".to_owned())?;
        }
        let unit = u64::from(group.unit_tokens);
        check("units", units, !slots || units == 1, &|| "1, a state slot is indivisible".to_owned())?;
        check("block_tokens", tokens, slots || units * unit == tokens, &|| format!("{units} units of {unit} tokens"))?;
        for (what, value) in [("units", limit * units), ("pages", limit * u64::from(at.pages))] {
            check(what, value, value <= MAX_DESCRIPTORS, &|| "at most 2^31".to_owned())?;
        }
        check("rank", at.rank.into(), at.rank < at.ranks, &|| format!("below the {} ranks", at.ranks))?;
        for segment in segments.iter().filter(|segment| segment.groups.contains(&index)) {
            let count = segment.span(side).count();
            let (needed, scale) = match segment.take {
                Take::All | Take::Rest => (limit * units, units),
                Take::Whole(scale) => (limit, scale.into()),
            };
            let what = format!("units per descriptor of {}", segment.name);
            check(&what, scale, scale == units, &|| format!("the {units} units of a logical block"))?;
            check("units", needed, needed <= count, &|| {
                format!("at most the {count} descriptors of {}", segment.name)
            })?;
        }
    }
    let (local, remote) = (group.local, group.remote);
    let (more, fewer) = (local.ranks.max(remote.ranks), local.ranks.min(remote.ranks));
    let what = || format!("group {index}: context-parallel ranks");
    let common = more.is_multiple_of(fewer) && local.rank % fewer == remote.rank % fewer;
    ensure(common, what, more.into(), || {
        format!("a multiple of the other side's {fewer}, on ranks with common blocks")
    })?;
    let even = group.order == Order::Start && local.block_tokens == remote.block_tokens && local.units == remote.units;
    ensure(more == 1 || even, what, more.into(), || {
        "1, unless both sides have equal blocks paired from the start".to_owned()
    })
}

/// The memory pages of a block.
fn pages(positions: &Positions, id: u32) -> Range<u64> {
    let (first, count) = (u64::from(id) * u64::from(positions.pages), u64::from(positions.pages));
    first..first + count
}

/// Marks pages in a bit map, a word at a time; the first of them that was marked before, if there is one.
fn claim(seen: &mut [u64], pages: Range<u64>) -> Option<u64> {
    let mut page = pages.start;
    while page < pages.end {
        let (bit, word) = (page % 64, seen.get_mut((page / 64) as usize)?);
        let count = min(64 - bit, pages.end - page);
        let mask = (u64::MAX >> (64 - count)) << bit;
        if *word & mask != 0 {
            return Some(page - bit + u64::from((*word & mask).trailing_zeros()));
        }
        *word |= mask;
        page += count;
    }
    None
}

/// The refusal of a page's second writer; only now, on the way out, is it worth finding the first.
fn twice<'a>(
    side: Side,
    (group, position, value): (usize, usize, u32),
    mut members: impl Iterator<Item = (usize, (&'a Positions, &'a Vec<u32>))>,
    page: u64,
) -> Error {
    let first = members.find_map(|(index, (other, list))| {
        let holds = |id: &u32| other.null != Some(*id) && pages(other, *id).contains(&page);
        list.iter().position(holds).map(|at| (index, at))
    });
    let (first_group, first_position) = first.unwrap_or((group, position));
    Error::IdRepeated {
        ids: Ids { side: Some(side), group: Some(group) },
        position,
        value,
        first_group,
        first_position,
    }
}

/// Somewhere to write an index to: memory of the caller, initialised or not.
pub trait Slot {
    /// Writes an index, which is below 2^31.
    fn put(&mut self, index: u32);
}

impl Slot for i32 {
    fn put(&mut self, index: u32) {
        *self = index as i32;
    }
}

impl Slot for u32 {
    fn put(&mut self, index: u32) {
        *self = index;
    }
}

impl Slot for std::mem::MaybeUninit<i32> {
    fn put(&mut self, index: u32) {
        self.write(index as i32);
    }
}

/// Writes the indices of runs from `start` on; returns how many there was room for.
fn write<S: Slot>(slots: &mut [S], runs: impl Iterator<Item = Run>, side: Side, start: u32) -> usize {
    let mut at = 0;
    for run in runs {
        let first = start.wrapping_add(run.on(side));
        if run.len == 1 {
            let Some(slot) = slots.get_mut(at) else { break };
            slot.put(first);
            at += 1;
        } else {
            let Some(rest) = slots.get_mut(at..) else { break };
            rest.iter_mut().zip(0..run.len).for_each(|(slot, i)| slot.put(first.wrapping_add(i)));
            at += rest.len().min(run.len as usize);
        }
    }
    at
}

/// Segments of one shape and one list of groups: a request costs the same in each, and there are as many as layers.
#[derive(Clone, Debug)]
struct Kind {
    shape: Shape,
    groups: Vec<usize>,
    /// How many there are.
    segments: u64,
    /// Bytes of one unit of each, together.
    len: u64,
}

impl Kind {
    fn of(segments: &[Segment]) -> Vec<Self> {
        let mut kinds: Vec<Self> = Vec::new();
        for segment in segments {
            let shape = Shape::of(segment);
            match kinds.iter_mut().find(|kind| kind.shape == shape && kind.groups == segment.groups) {
                Some(kind) => {
                    kind.segments += 1;
                    kind.len = kind.len.saturating_add(segment.len); // only of segments without blocks is it so large
                }
                None => kinds.push(Self { shape, groups: segment.groups.clone(), segments: 1, len: segment.len }),
            }
        }
        kinds
    }
}

/// What of a segment decides how neighbouring descriptors merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    take: Take,
    /// Units between two gaps in memory on each side; `None` where there are no gaps.
    gaps: (Option<u32>, Option<u32>),
}

impl Shape {
    fn of(segment: &Segment) -> Self {
        let gaps = |span: &Span| if span.is_dense(segment.len) { None } else { Some(span.split) };
        Self { take: segment.take, gaps: (gaps(&segment.local), gaps(&segment.remote)) }
    }

    /// Descriptors that remain of consecutive runs once neighbours are merged.
    fn pieces(self, runs: impl Iterator<Item = Run>) -> u64 {
        let mut end = None;
        let mut pieces = 0;
        for run in runs {
            pieces += self.parts(run);
            // The first unit of a group may follow the last one of the group before.
            pieces -= u64::from(end == Some((run.local, run.remote)) && !self.breaks(run.local, run.remote));
            end = Some((run.local + run.len, run.remote + run.len));
        }
        pieces
    }

    /// Whether memory has a gap before this unit on either side.
    fn breaks(self, local: u32, remote: u32) -> bool {
        let gap = |split: Option<u32>, unit: u32| split.is_some_and(|split| unit.is_multiple_of(split));
        gap(self.gaps.0, local) || gap(self.gaps.1, remote)
    }

    /// Descriptors that remain of one run.
    fn parts(self, run: Run) -> u64 {
        let cut = |first: u32, split: u32| u64::from((first + run.len - 1) / split - first / split) + 1;
        match self.gaps {
            (None, None) => 1,
            (Some(1), _) | (_, Some(1)) => run.len.into(),
            (Some(split), None) => cut(run.local, split),
            (None, Some(split)) => cut(run.remote, split),
            (Some(_), Some(_)) => {
                1 + (1..run.len).filter(|i| self.breaks(run.local + i, run.remote + i)).count() as u64
            }
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
    whole: bool,
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
        let consumer = self.sides().0;
        let tokens = self
            .first
            .map_or(0, |first| u128::from(first) * u128::from(consumer.block_tokens) * u128::from(consumer.ranks));
        if self.group.order != Order::Slots && tokens >= u128::from(MAX_TOKENS) {
            return Err(format!("num_computed_blocks places the consumer at token {tokens}, it must be below 2^48"));
        }
        match self.group.order {
            Order::Slots => self.slots(),
            Order::Start if self.group.local.ranks > 1 || self.group.remote.ranks > 1 => self.interleaved(),
            Order::Start | Order::Window { .. } => self.by_position(&self.place()?),
        }
    }

    /// Adds `len` paired units of one logical block.
    fn add(&self, out: &mut GroupPairs, consumer: u32, producer: u32, len: u32) {
        let (local, remote) = match self.direction {
            Direction::Read => (consumer, producer),
            Direction::Write => (producer, consumer),
        };
        let run = Run { local, remote, len };
        if self.whole && len < self.group.local.units {
            out.partial = Some(run);
        } else {
            out.join(run);
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
        // The first position of `start..end` that the consumer cannot do without and the producer does not list.
        let missing = |start: u64, end: u64| {
            let needed = clamp(&needed, start, end);
            let first = if needed.start < covered.start { needed.start } else { max(needed.start, covered.end) };
            (first < needed.end).then_some(first)
        };
        let moved = max(wanted.start, covered.start)..min(wanted.end, covered.end);
        if missing(wanted.start, max(wanted.start, wanted.end)).is_none()
            && let Some(out) = self.block_by_block(consumer_range.start, producer_range.start, &moved)
        {
            return Ok(out);
        }
        let mut out = GroupPairs::default();
        let mut at = consumer_range.start;
        // The producer's list index and unit of the next moved position; positions are consecutive, so it only steps.
        let offset = moved.start.saturating_sub(producer_range.start);
        let (mut index, mut part) = ((offset / u64::from(units_p)) as usize, (offset % u64::from(units_p)) as u32);
        for &block in self.consumer {
            let end = at + u64::from(units_c);
            let inside = clamp(&moved, at, end);
            let (mut left, skipped) = ((inside.end - inside.start) as u32, (inside.start - at) as u32);
            let placeholder = consumer.null == Some(block);
            let mut unit = if placeholder { 0 } else { block * units_c };
            if !placeholder {
                if let Some(position) = missing(at, end) {
                    return Err(uncovered(position));
                }
                out.leave(unit, skipped);
            }
            unit += skipped;
            while left > 0 {
                let len = min(units_p - part, left);
                match self.producer.get(index) {
                    _ if placeholder => {}
                    Some(id) if producer.null != Some(*id) => self.add(&mut out, unit, id * units_p + part, len),
                    _ if inside.end - u64::from(left - len) > placed.needed => {
                        return Err(uncovered(inside.end - u64::from(left)));
                    }
                    _ => out.leave(unit, len),
                }
                unit += len;
                left -= len;
                part += len;
                if part == units_p {
                    (index, part) = (index + 1, 0);
                }
            }
            if !placeholder {
                out.leave(unit, (end - max(inside.end, at)) as u32);
            }
            at = end;
        }
        Ok(out)
    }

    /// The common case of [`Request::by_position`]: blocks of one size on both sides and no placeholder among them.
    fn block_by_block(&self, consumer_start: u64, producer_start: u64, moved: &Range<u64>) -> Option<GroupPairs> {
        let (consumer, producer) = self.sides();
        let units = u64::from(consumer.units);
        if consumer.units != producer.units || moved.start >= moved.end {
            return None;
        }
        let aligned = |start: u64| moved.start.checked_sub(start).filter(|offset| offset.is_multiple_of(units));
        let (skip_c, skip_p) = (aligned(consumer_start)? / units, aligned(producer_start)? / units);
        let (whole, part) = ((moved.end - moved.start) / units, (moved.end - moved.start) % units);
        let listed = (whole + u64::from(part > 0)) as usize;
        let (before, rest) = self.consumer.split_at_checked(skip_c as usize)?;
        let (to, after) = rest.split_at_checked(listed)?;
        let from = self.producer.get(skip_p as usize..)?.get(..listed)?;
        let placeholder = |null: Option<u32>, list: &[u32]| null.is_some_and(|null| list.contains(&null));
        if placeholder(consumer.null, self.consumer) || placeholder(producer.null, from) {
            return None;
        }
        let mut out = GroupPairs { runs: Vec::with_capacity(listed.min(64)), ..GroupPairs::default() };
        for block in before {
            out.leave(block * consumer.units, consumer.units);
        }
        let mut run = (0, 0, 0);
        for (&to, &from) in to.iter().zip(from).take(whole as usize) {
            if run.2 > 0 && to == run.0 + run.2 && from == run.1 + run.2 {
                run.2 += 1;
            } else {
                out.runs.extend(self.run(run));
                run = (to, from, 1);
            }
        }
        out.runs.extend(self.run(run));
        if let (true, Some(to), Some(from)) = (part > 0, to.last(), from.last()) {
            self.add(&mut out, to * consumer.units, from * producer.units, part as u32);
            out.leave(to * consumer.units + part as u32, consumer.units - part as u32);
        }
        for block in after {
            out.leave(block * consumer.units, consumer.units);
        }
        Some(out)
    }

    /// A run of whole blocks of one size on both sides, `(consumer, producer, count)`, in units.
    fn run(&self, (consumer, producer, count): (u32, u32, u32)) -> Option<Run> {
        let units = self.group.local.units;
        let (local, remote) = match self.direction {
            Direction::Read => (consumer, producer),
            Direction::Write => (producer, consumer),
        };
        (count > 0).then_some(Run { local: local * units, remote: remote * units, len: count * units })
    }

    /// Moves the blocks of the sequence that both ranks hold, of context-parallel engines that deal blocks out in turn.
    ///
    /// Blocks that the consumer holds but this producer does not are another plan's: neither moved nor left here.
    fn interleaved(&self) -> std::result::Result<GroupPairs, String> {
        let (consumer, producer) = self.sides();
        let (units, listed) = (u64::from(consumer.units), self.consumer.len() as u64);
        let (ranks_c, ranks_p) = (u64::from(consumer.ranks), u64::from(producer.ranks));
        let tokens = self.tokens.filter(|tokens| *tokens < MAX_TOKENS);
        let Some(tokens) = tokens else {
            return Err("context-parallel blocks are paired by position; pass num_tokens, below 2^48".to_owned());
        };
        let block = u64::from(consumer.block_tokens);
        let first = if let Some(first) = self.first {
            u64::from(first)
        } else {
            // Some engines list a block on every rank even where the sequence ends before it; both ways of counting have
            // to say the same.
            let blocks = tokens.div_ceil(block);
            let own = blocks.saturating_sub(consumer.rank.into()).div_ceil(ranks_c);
            let placed = (own == blocks.div_ceil(ranks_c)).then(|| own.checked_sub(listed)).flatten();
            placed.ok_or_else(|| {
                format!(
                    "consumer lists {listed} blocks of {block} tokens, {tokens} tokens need {own} on rank {} of {ranks_c}; \
                     pass num_computed_blocks (blocks of this rank) to place them",
                    consumer.rank
                )
            })?
        };
        let end = tokens.div_ceil(self.group.unit_tokens.into());
        let mut out = GroupPairs::default();
        for (index, &to) in self.consumer.iter().enumerate().filter(|(_, id)| consumer.null != Some(**id)) {
            let at = (first + index as u64) * ranks_c + u64::from(consumer.rank);
            if at % ranks_p != u64::from(producer.rank) {
                continue;
            }
            let moved = end.saturating_sub(at * units).min(units) as u32;
            let from = self.producer.get((at / ranks_p) as usize).filter(|id| producer.null != Some(**id));
            match from {
                _ if moved == 0 => {}
                Some(from) => self.add(&mut out, to * consumer.units, from * producer.units, moved),
                None => {
                    return Err(format!(
                        "consumer block at position {index} (block {at} of the sequence) has no producer block: consumer lists \
                         {listed} blocks, producer {}",
                        self.producer.len()
                    ));
                }
            }
            out.leave(to * consumer.units + moved, consumer.units - moved);
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
            self.add(&mut out, to, from, 1);
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::claim;

    proptest! {
        #[test]
        fn pages_are_claimed_once(ranges in prop::collection::vec((0..400_u64, 0..200_u64), 0..8)) {
            let (mut seen, mut known) = (vec![0_u64; 10], BTreeSet::new());
            for (start, count) in ranges {
                let taken = (start..start + count).find(|page| known.contains(page));
                prop_assert_eq!(claim(&mut seen, start..start + count), taken);
                if taken.is_some() {
                    break; // the request is refused
                }
                known.extend(start..start + count);
            }
            let marked = |page: u64| seen.get((page / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 == 1);
            prop_assert!(known.iter().all(|page| marked(*page)));
        }
    }
}
