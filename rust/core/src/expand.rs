//! Logical block ids to kernel block ids, for one list.

use crate::error::{Error, Ids, Result, ensure, reserve};
use crate::table::MAX_DESCRIPTORS;

/// Kernel block ids of `ids`: logical `b` becomes `b*ratio .. b*ratio + width`.
///
/// `width` is how many leading kernel blocks of each logical block are wanted, at most `ratio`: an id past its own
/// logical block would name a block of somebody else.
///
/// ```
/// # use nixl_fast_core::{expand, Ids};
/// let ids = Ids { side: None, group: None };
/// assert_eq!(expand(&[5, 9], 2, 2, ids).unwrap(), [10, 11, 18, 19]);
/// ```
pub fn expand(block_ids: &[u32], ratio: u32, width: u32, ids: Ids) -> Result<Vec<i32>> {
    ensure(ratio > 0, || "ratio".to_owned(), ratio.into(), || "1 or more".to_owned())?;
    let rule = || format!("between 1 and the ratio {ratio}");
    ensure((1..=ratio).contains(&width), || "width".to_owned(), width.into(), rule)?;
    // The largest expanded id, b * ratio + width - 1, has to stay below 2^31.
    let limit = (MAX_DESCRIPTORS + u64::from(ratio - width)) / u64::from(ratio);
    check_below(block_ids, limit, ids)?;
    let total = block_ids.len() as u64 * u64::from(width);
    ensure(total <= MAX_DESCRIPTORS, || "number of expanded ids".to_owned(), total, || "at most 2^31".to_owned())?;
    let mut out = reserve("the expanded list", total)?;
    if width == 1 {
        // No product is past the limit just checked.
        out.extend(block_ids.iter().map(|&block| block.wrapping_mul(ratio) as i32));
        return Ok(out);
    }
    for &block in block_ids {
        let first = block * ratio;
        out.extend((first..first + width).map(|id| id as i32));
    }
    Ok(out)
}

/// Refuses the first id that is not below `limit`.
pub(crate) fn check_below(block_ids: &[u32], limit: u64, ids: Ids) -> Result<()> {
    let largest = block_ids.iter().copied().max();
    if largest.is_none_or(|id| u64::from(id) < limit) {
        return Ok(());
    }
    let bad = block_ids.iter().enumerate().find(|(_, id)| u64::from(**id) >= limit);
    bad.map_or(Ok(()), |(position, id)| Err(Error::IdTooLarge { ids, position, value: id.to_string(), limit }))
}
