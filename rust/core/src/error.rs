//! What can be refused, and the words it is refused with.

use std::fmt;

/// Which engine's memory a number belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This rank.
    Local,
    /// The peer's rank.
    Remote,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Remote => "remote",
        })
    }
}

/// Where a list of block ids came from, as an error message names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids {
    /// The side that listed the ids; `None` where there is only one.
    pub side: Option<Side>,
    /// Index of the group; `None` where there is only one.
    pub group: Option<usize>,
}

impl fmt::Display for Ids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.side, self.group) {
            (Some(side), Some(group)) => write!(f, "{side} group {group}"),
            (None, Some(group)) => write!(f, "group {group}"),
            (Some(side), None) => write!(f, "the {side} block ids"),
            (None, None) => f.write_str("the block ids"),
        }
    }
}

/// Everything the core refuses. The binding maps each family to one Python exception class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    // -- block ids: `BlockIdError`
    /// An id that names no block.
    #[error("block id {value} at position {position} of {ids} is not below {limit}")]
    IdTooLarge {
        /// The list.
        ids: Ids,
        /// Index in the list.
        position: usize,
        /// The id, as text since it may exceed every integer type.
        value: String,
        /// The number of blocks.
        limit: u64,
    },
    /// An id below zero.
    #[error("block id {value} at position {position} of {ids} is negative (ids are 0 to {limit} exclusive)")]
    IdNegative {
        /// The list.
        ids: Ids,
        /// Index in the list.
        position: usize,
        /// The id.
        value: String,
        /// The number of blocks.
        limit: u64,
    },
    /// Two writers of one block.
    #[error(
        "block id {value} at position {position} of {ids} was already at position {first_position} of group {first_group}: \
         two writers of one block"
    )]
    IdRepeated {
        /// The list.
        ids: Ids,
        /// Index in the list of the second occurrence.
        position: usize,
        /// The id.
        value: u32,
        /// Group of the first occurrence.
        first_group: usize,
        /// Index in that group's list of the first occurrence.
        first_position: usize,
    },
    /// One list of ids per group is needed.
    #[error("{side} block ids have {got} groups, the plan has {expected}")]
    GroupCount {
        /// The side that listed the ids.
        side: Side,
        /// Lists given.
        got: usize,
        /// Groups of the plan.
        expected: usize,
    },

    // -- geometry: `GeometryError`
    /// A number out of its range.
    #[error("{what} is {value}, it must be {rule}")]
    Invalid {
        /// The number's name.
        what: String,
        /// Its value.
        value: u64,
        /// What is allowed.
        rule: String,
    },
    /// Spacing smaller than what it spaces.
    #[error("{what}: stride {stride} is smaller than the {split} x {len} bytes of one block")]
    StrideTooSmall {
        /// The segment and side.
        what: String,
        /// Bytes between starts of consecutive blocks.
        stride: u64,
        /// Units per block.
        split: u32,
        /// Bytes per unit.
        len: u64,
    },
    /// Memory past the end of the address space.
    #[error("{what}: last byte lies past 2^64 (base {base}, {blocks} blocks, stride {stride})")]
    AddressOverflow {
        /// The segment and side.
        what: String,
        /// Address of the first byte.
        base: u64,
        /// Number of blocks.
        blocks: u32,
        /// Bytes between starts of consecutive blocks.
        stride: u64,
    },
    /// More descriptors than an int32 can index.
    #[error("{side} table has {count} descriptors, int32 indices allow {limit}")]
    TooManyDescriptors {
        /// The side.
        side: Side,
        /// Number of descriptors.
        count: u64,
        /// The limit.
        limit: u64,
    },

    /// More memory than there is.
    #[error("{what} needs {bytes} bytes, more than can be allocated")]
    OutOfMemory {
        /// What was to be made.
        what: String,
        /// Its size.
        bytes: u64,
    },

    // -- pairing: `PairingError`
    /// The request as a whole makes no certain pairing.
    #[error("group {group}: {reason}")]
    Pairing {
        /// Index of the group.
        group: usize,
        /// What contradicts what, with both values.
        reason: String,
    },
    /// `num_computed_blocks` has one entry per group.
    #[error("num_computed_blocks has {got} entries, the plan has {expected} groups")]
    ComputedCount {
        /// Entries given.
        got: usize,
        /// Groups of the plan.
        expected: usize,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Refuses a number that breaks `rule`.
pub(crate) fn ensure(ok: bool, what: impl FnOnce() -> String, value: u64, rule: impl FnOnce() -> String) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::Invalid { what: what(), value, rule: rule() }) }
}

/// An empty vector with room for `count` elements, or a refusal instead of an abort.
pub(crate) fn reserve<T>(what: &str, count: u64) -> Result<Vec<T>> {
    let mut out = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>() as u64);
    let refused = |_| Error::OutOfMemory { what: what.to_owned(), bytes };
    out.try_reserve_exact(usize::try_from(count).unwrap_or(usize::MAX)).map_err(refused)?;
    Ok(out)
}
