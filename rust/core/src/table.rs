//! Segments of memory, and the descriptor lists that NIXL prepares from them.
//!
//! A descriptor id is flat: the start of its segment plus the unit's index in the segment. [`Span::unit`] is the last
//! step of a block id's way to a byte address.

use std::mem::MaybeUninit;

use crate::error::{Error, Result, Side, ensure};

/// Descriptors one list may hold, so that the last id is 2^31 - 1.
pub const MAX_DESCRIPTORS: u64 = 1 << 31;

/// Strided rows one list may need, of 40 bytes each: padded blocks that are cut need a row each, and a peer says how many
/// blocks it has.
const MAX_ROWS: u64 = 1 << 23;

/// One side of a segment: evenly spaced blocks of `split` back-to-back units each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Address of the first byte of unit 0.
    pub base: u64,
    /// Bytes between the starts of consecutive blocks.
    pub stride: u64,
    /// Number of blocks; 0 makes no descriptor.
    pub blocks: u32,
    /// Units per block.
    pub split: u32,
    /// Device the memory is on.
    pub device: u64,
}

impl Span {
    /// Number of descriptors.
    #[must_use]
    pub fn count(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.split)
    }

    /// Whether consecutive units of `len` bytes follow each other without a gap, also from block to block.
    #[must_use]
    pub fn is_dense(&self, len: u64) -> bool {
        self.blocks <= 1 || len.checked_mul(self.split.into()) == Some(self.stride)
    }

    /// Address of unit `index`.
    #[must_use]
    pub fn unit(&self, len: u64, index: u32) -> u64 {
        let (block, part) = (index / self.split, index % self.split);
        self.base + u64::from(block) * self.stride + u64::from(part) * len
    }

    /// Strided rows `(addr, len, device, stride, count)`: one where the units are evenly spaced, else one per block.
    fn rows(&self, len: u64, out: &mut Vec<[u64; 5]>) {
        if self.blocks == 0 {
        } else if self.is_dense(len) {
            out.push([self.base, len, self.device, len, self.count()]);
        } else if self.split == 1 {
            out.push([self.base, len, self.device, self.stride, self.count()]);
        } else {
            let row = |block| [self.base + u64::from(block) * self.stride, len, self.device, len, self.split.into()];
            out.extend((0..self.blocks).map(row));
        }
    }

    /// Number of strided rows.
    fn row_count(&self, len: u64) -> u64 {
        if self.blocks == 0 {
            0
        } else if self.is_dense(len) || self.split == 1 {
            1
        } else {
            self.blocks.into()
        }
    }

    fn check(&self, len: u64, what: impl Fn() -> String) -> Result<()> {
        for (name, value) in [("bytes per unit", len), ("units per block", self.split.into())] {
            ensure(value > 0, || format!("{}: {name}", what()), value, || "1 or more".to_owned())?;
        }
        let (stride, split, base, blocks) = (self.stride, self.split, self.base, self.blocks);
        let block = len.checked_mul(split.into());
        if blocks > 1 && block.is_none_or(|bytes| bytes > stride) {
            return Err(Error::StrideTooSmall { what: what(), stride, split, len });
        }
        // The last byte has to have an address; the one after it need not.
        let last = u64::from(blocks.saturating_sub(1))
            .checked_mul(stride)
            .and_then(|offset| offset.checked_add(base))
            .and_then(|start| start.checked_add(block?.checked_sub(1)?));
        if blocks > 0 && last.is_none() {
            return Err(Error::AddressOverflow { what: what(), base, blocks, stride });
        }
        Ok(())
    }
}

/// Which of a group's paired units a segment takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// All of them.
    All,
    /// Whole logical blocks, as one descriptor of this many units each.
    Whole(u32),
    /// What `Whole` leaves: the units of a logical block that is only partly inside the data.
    Rest,
}

/// Memory that both sides address with equally long units: (a part of) one region and its counterpart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// What an error message calls it.
    pub name: String,
    /// Bytes per unit, the same on both sides.
    pub len: u64,
    /// This rank's memory.
    pub local: Span,
    /// The peer's memory.
    pub remote: Span,
    /// Groups whose blocks live here, in the order in which their descriptors are listed.
    pub groups: Vec<usize>,
    /// Which units of those groups.
    pub take: Take,
}

impl Segment {
    /// The span on `side`.
    #[must_use]
    pub fn span(&self, side: Side) -> &Span {
        match side {
            Side::Local => &self.local,
            Side::Remote => &self.remote,
        }
    }
}

/// One side's descriptor list: every segment's units, one after the other.
#[derive(Clone, Debug)]
pub struct Table {
    starts: Vec<u32>,
    side: Side,
}

impl Table {
    /// Checks every segment of `side` and numbers its descriptors.
    pub fn new(segments: &[Segment], side: Side) -> Result<Self> {
        let mut starts = Vec::with_capacity(segments.len());
        let (mut count, mut rows) = (0_u64, 0_u64);
        for segment in segments {
            let span = segment.span(side);
            span.check(segment.len, || format!("{} ({side})", segment.name))?;
            starts.push(count as u32);
            count += span.count();
            if count > MAX_DESCRIPTORS {
                return Err(Error::TooManyDescriptors { side, count, limit: MAX_DESCRIPTORS });
            }
            rows += span.row_count(segment.len);
            let rule = || format!("at most {MAX_ROWS}: blocks that are padded and cut need a row each");
            ensure(rows <= MAX_ROWS, || format!("rows of the {side} table"), rows, rule)?;
        }
        Ok(Self { starts, side })
    }

    /// Descriptor id of each segment's unit 0.
    #[must_use]
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// The list as strided rows `(addr, len, device, stride, count)`.
    #[must_use]
    pub fn rows(&self, segments: &[Segment]) -> Vec<[u64; 5]> {
        let mut out = Vec::new();
        for segment in segments {
            segment.span(self.side).rows(segment.len, &mut out);
        }
        out
    }

    /// Number of descriptors.
    #[must_use]
    pub fn count(&self, segments: &[Segment]) -> u64 {
        segments.iter().map(|segment| segment.span(self.side).count()).sum()
    }

    /// Writes the same list as `(addr, len, device)`, one row per descriptor, to `out`, which has to hold three numbers of
    /// each; returns how many numbers were written, always from the front.
    pub fn write_expanded(&self, segments: &[Segment], out: &mut [MaybeUninit<u64>]) -> usize {
        let (slots, _) = out.as_chunks_mut::<3>();
        let mut at = 0;
        for [addr, len, device, stride, count] in self.rows(segments) {
            let rest = slots.get_mut(at..).unwrap_or_default();
            for (index, slot) in (0..count).zip(rest.iter_mut()) {
                *slot = [addr + index * stride, len, device].map(MaybeUninit::new);
            }
            at += rest.len().min(count as usize);
        }
        3 * at
    }
}
