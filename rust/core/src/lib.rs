//! Block id arithmetic for KV-cache transfer with NIXL: expansion, pairing, descriptor indices and tables.
//!
//! The crate knows numbers only: no Python, no NIXL, no I/O. Every function is total over caller data, it returns a
//! value or an [`Error`] and never panics. A request's block ids enter through [`Plan::pair`], become unit indices
//! there, and leave as descriptor indices into the tables that [`Table`] describes.

#![forbid(unsafe_code)]

mod error;
mod expand;
mod pair;
mod table;

pub use error::{Error, Ids, Result, Side};
pub use expand::expand;
pub use pair::{Direction, Group, GroupPairs, Order, Pairs, Plan, Positions, Run, Slot, Unmoved};
pub use table::{MAX_DESCRIPTORS, Segment, Span, Table, Take};
