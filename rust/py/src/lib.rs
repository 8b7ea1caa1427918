//! `nixl_fast._native`: borrow from Python, call the core, hand back. No arithmetic here.

mod errors;
mod ids;
mod memory;

use std::mem::MaybeUninit;
use std::sync::Arc;

use nixl_fast_core as core;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use errors::to_py;

type Ids<'py> = Bound<'py, PyArray1<i32>>;

/// Ids or indices above which a call lets other Python threads run. Below it, giving the lock up costs more than it frees.
const DETACH_ABOVE: usize = 1 << 14;

/// `expand_block_ids` of one group; `group` only names it in errors.
#[pyfunction]
#[pyo3(signature = (block_ids, ratio, width, group=None))]
fn expand<'py>(
    py: Python<'py>,
    block_ids: &Bound<'py, PyAny>,
    ratio: u32,
    width: u32,
    group: Option<usize>,
) -> PyResult<Ids<'py>> {
    let ids = core::Ids { side: None, group };
    let blocks = ids::read(block_ids, ids, core::MAX_DESCRIPTORS / u64::from(ratio.max(1)))?;
    let size = blocks.len().saturating_mul(width as usize);
    let out = detached(py, size, || core::expand(&blocks, ratio, width, ids));
    Ok(out.map_err(|error| to_py(py, &error))?.into_pyarray(py))
}

#[derive(FromPyObject)]
struct SpanRow {
    base: u64,
    stride: u64,
    blocks: u32,
    split: u32,
    device: u64,
}

impl From<SpanRow> for core::Span {
    fn from(row: SpanRow) -> Self {
        Self { base: row.base, stride: row.stride, blocks: row.blocks, split: row.split, device: row.device }
    }
}

#[derive(FromPyObject)]
struct SegmentRow {
    name: String,
    len: u64,
    local: SpanRow,
    remote: SpanRow,
    groups: Vec<usize>,
    /// Units per descriptor where logical blocks are taken whole, 0 for what that leaves, 1 otherwise.
    whole: u32,
}

#[derive(FromPyObject)]
struct PositionsRow {
    block_tokens: u32,
    units: u32,
    limit: u32,
    null: Option<u32>,
    pages: u32,
    ranks: u32,
    rank: u32,
}

impl From<PositionsRow> for core::Positions {
    fn from(row: PositionsRow) -> Self {
        Self {
            block_tokens: row.block_tokens,
            units: row.units,
            limit: row.limit,
            null: row.null,
            pages: row.pages,
            ranks: row.ranks,
            rank: row.rank,
        }
    }
}

#[derive(FromPyObject)]
struct GroupRow {
    slots: bool,
    window: Option<u32>,
    unit_tokens: u32,
    local: PositionsRow,
    remote: PositionsRow,
}

/// The routing table of one plan.
#[pyclass(frozen, module = "nixl_fast._native")]
struct NativePlan {
    plan: Arc<core::Plan>,
}

#[pymethods]
impl NativePlan {
    #[new]
    fn new(
        py: Python<'_>,
        read: bool,
        groups: Vec<GroupRow>,
        segments: Vec<SegmentRow>,
        sharing: Vec<Vec<usize>>,
    ) -> PyResult<Self> {
        let direction = if read { core::Direction::Read } else { core::Direction::Write };
        let group = |row: GroupRow| core::Group {
            order: match (row.slots, row.window) {
                (true, _) => core::Order::Slots,
                (false, Some(tokens)) => core::Order::Window { tokens },
                (false, None) => core::Order::Start,
            },
            unit_tokens: row.unit_tokens,
            local: row.local.into(),
            remote: row.remote.into(),
        };
        let segment = |row: SegmentRow| core::Segment {
            name: row.name,
            len: row.len,
            local: row.local.into(),
            remote: row.remote.into(),
            groups: row.groups,
            take: match row.whole {
                0 => core::Take::Rest,
                1 => core::Take::All,
                units => core::Take::Whole(units),
            },
        };
        let groups = groups.into_iter().map(group).collect();
        let segments = segments.into_iter().map(segment).collect();
        let plan = core::Plan::new(direction, groups, segments, sharing).map_err(|error| to_py(py, &error))?;
        Ok(Self { plan: Arc::new(plan) })
    }

    /// Strided rows of one side, `uint64[N, 5]`.
    fn table<'py>(&self, py: Python<'py>, local: bool) -> PyResult<Bound<'py, PyArray2<u64>>> {
        let rows = self.plan.table(side(local)).rows(self.plan.segments());
        into_matrix(py, rows)
    }

    /// One row per descriptor of one side, `uint64[N, 3]`.
    fn expanded<'py>(&self, py: Python<'py>, local: bool) -> PyResult<Bound<'py, PyArray2<u64>>> {
        let table = self.plan.table(side(local));
        let count = table.count(self.plan.segments()) as usize;
        memory::written(py, [count, 3], |slots| py.detach(|| table.write_expanded(self.plan.segments(), slots)))
    }

    /// Pairs one request.
    fn pair(
        &self,
        py: Python<'_>,
        local_block_ids: &Bound<'_, PyAny>,
        remote_block_ids: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        num_computed_blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pairing> {
        let local = ids::read_groups(local_block_ids, &self.plan, core::Side::Local)?;
        let remote = ids::read_groups(remote_block_ids, &self.plan, core::Side::Remote)?;
        let tokens = num_tokens.map(|value| ids::count(value, "num_tokens")).transpose()?;
        let computed = num_computed_blocks.map(ids::read_computed).transpose()?;
        let work = || self.plan.pair(&local, &remote, tokens, computed.as_deref());
        let pairs = detached(py, local.iter().map(Vec::len).sum(), work).map_err(|error| to_py(py, &error))?;
        let local_desc_ids = self.indices(py, &pairs, core::Side::Local)?;
        let remote_desc_ids = self.indices(py, &pairs, core::Side::Remote)?;
        Ok(Pairing { pairs, local_desc_ids, remote_desc_ids })
    }
}

impl NativePlan {
    /// Writes one side's indices into memory of numpy's, which asks for huge pages where an array is large.
    fn indices(&self, py: Python<'_>, pairs: &core::Pairs, side: core::Side) -> PyResult<Py<PyArray1<i32>>> {
        let count = pairs.descriptors as usize;
        let work = |slots: &mut [MaybeUninit<i32>]| detached(py, count, || self.plan.write_indices(pairs, side, slots));
        Ok(memory::written_again(py, count, work)?.unbind())
    }
}

/// Runs `work`, and lets other Python threads run meanwhile if it is large.
fn detached<T: Send>(py: Python<'_>, size: usize, work: impl FnOnce() -> T + Send) -> T {
    if size > DETACH_ABOVE { py.detach(work) } else { work() }
}

/// What one request moves, and what it deliberately does not.
#[pyclass(frozen, module = "nixl_fast")]
struct Pairing {
    pairs: core::Pairs,
    local_desc_ids: Py<PyArray1<i32>>,
    remote_desc_ids: Py<PyArray1<i32>>,
}

#[pymethods]
impl Pairing {
    /// Indices into the local list, `int32`, 1-D, C-contiguous.
    #[getter]
    fn local_desc_ids<'py>(&self, py: Python<'py>) -> Ids<'py> {
        self.local_desc_ids.bind(py).clone()
    }

    /// Indices into the remote list, `int32`, 1-D, C-contiguous, as long as the local ones.
    #[getter]
    fn remote_desc_ids<'py>(&self, py: Python<'py>) -> Ids<'py> {
        self.remote_desc_ids.bind(py).clone()
    }

    /// `(remote_units, local_units)` of one group, `int32`, paired element by element.
    ///
    /// A unit is `unit_tokens` tokens of one kernel block (the kernel block itself where both sides have the same), or a
    /// state slot of a Mamba group. Raises `IndexError` for a group that the plan does not have.
    fn kernel_pairs<'py>(&self, py: Python<'py>, group: &Bound<'py, PyAny>) -> PyResult<(Ids<'py>, Ids<'py>)> {
        let pairs = self.group(group)?;
        let units = |first: fn(&core::Run) -> u32| -> Vec<i32> {
            pairs.all().flat_map(|run| (first(run)..first(run) + run.len).map(|unit| unit as i32)).collect()
        };
        Ok((units(|run| run.remote).into_pyarray(py), units(|run| run.local).into_pyarray(py)))
    }

    /// Consumer units of one group that are listed but get no data, `int32`: the tail past the data, blocks before the
    /// window, a recomputed state slot. Raises `IndexError` for a group that the plan does not have.
    fn untransferred<'py>(&self, py: Python<'py>, group: &Bound<'py, PyAny>) -> PyResult<Ids<'py>> {
        let ranges = &self.group(group)?.unmoved;
        let units: Vec<i32> =
            ranges.iter().flat_map(|range| (range.first..range.first + range.len).map(|unit| unit as i32)).collect();
        Ok(units.into_pyarray(py))
    }

    /// Nothing moves: notify the producer and build no transfer, NIXL refuses empty lists.
    #[getter]
    fn notify_only(&self) -> bool {
        self.pairs.descriptors == 0
    }

    /// Descriptors on each side.
    #[getter]
    fn num_descs(&self) -> u64 {
        self.pairs.descriptors
    }

    /// Descriptors left after NIXL merges neighbours that are dense and ascend by one on both sides.
    #[getter]
    fn num_runs(&self) -> u64 {
        self.pairs.runs
    }

    /// Bytes moved.
    #[getter]
    fn num_bytes(&self) -> u64 {
        self.pairs.bytes
    }

    fn __repr__(&self) -> String {
        let core::Pairs { descriptors, runs, bytes, .. } = &self.pairs;
        format!("Pairing(num_descs={descriptors}, num_runs={runs}, num_bytes={bytes})")
    }
}

impl Pairing {
    fn group(&self, group: &Bound<'_, PyAny>) -> PyResult<&core::GroupPairs> {
        let number = ids::integer(group).and_then(|number| number.extract::<usize>().ok());
        number.and_then(|number| self.pairs.groups.get(number)).ok_or_else(|| {
            let (shown, count) = (ids::shown(group), self.pairs.groups.len());
            PyIndexError::new_err(format!("group {shown} of a plan that has {count}"))
        })
    }
}

fn side(local: bool) -> core::Side {
    if local { core::Side::Local } else { core::Side::Remote }
}

fn into_matrix<const N: usize>(py: Python<'_>, rows: Vec<[u64; N]>) -> PyResult<Bound<'_, PyArray2<u64>>> {
    let height = rows.len();
    rows.into_flattened().into_pyarray(py).reshape([height, N])
}

/// Native half of `nixl_fast`.
#[pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use super::{NativePlan, Pairing, expand};
}
