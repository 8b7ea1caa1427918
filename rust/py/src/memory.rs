//! Memory for what calls return: numpy's, and used again where asking the system for it would cost more than writing it.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Mutex;

use numpy::ndarray::{Dimension, IntoDimension};
use numpy::npyffi::{self, NpyTypes, PY_ARRAY_API, get_type_object};
use numpy::{Element, PyArray, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArrayMethods, ToNpyDims};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Indices of arrays that are kept: below it the allocator has warm memory anyway.
const KEEP_FROM: usize = 1 << 13;
/// Indices that are kept at most while nobody uses them, 128 MiB: both sides of ten million.
const KEEP: usize = 1 << 25;

/// Arrays that nobody uses, the one that has waited longest first.
static FREE: Mutex<Vec<Py<PyArray1<i32>>>> = Mutex::new(Vec::new());

/// What an answer's array has for a base: owns the memory while the array or a view of it lives.
#[pyclass(frozen, module = "nixl_fast._native")]
struct Memory {
    owner: Option<Py<PyArray1<i32>>>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (Some(owner), Ok(mut free)) = (self.owner.take(), FREE.try_lock()) else { return };
        Python::attach(|py| {
            let size = |array: &Py<PyArray1<i32>>| array.bind(py).len();
            while !free.is_empty() && free.iter().map(size).sum::<usize>() + size(&owner) > KEEP {
                free.remove(0);
            }
            free.push(owner);
        });
    }
}

/// An array that `work` writes, all of it; it returns how many elements it has written, from the front.
pub fn written<T: Element, D: IntoDimension>(
    py: Python<'_>,
    shape: D,
    work: impl FnOnce(&mut [MaybeUninit<T>]) -> usize,
) -> PyResult<Bound<'_, PyArray<T, D::Dim>>> {
    let array = new(py, shape, ptr::null_mut())?;
    fill(&array, work)?;
    Ok(array)
}

/// As [`written`], in memory that an earlier answer has been in if there is some: pages that the process has touched
/// before cost a fraction of new ones.
pub fn written_again(
    py: Python<'_>,
    count: usize,
    work: impl FnOnce(&mut [MaybeUninit<i32>]) -> usize,
) -> PyResult<Bound<'_, PyArray1<i32>>> {
    if !(KEEP_FROM..=KEEP).contains(&count) {
        return written(py, [count], work);
    }
    let owner = match take(py, count) {
        Some(owner) => owner,
        None => new(py, [count.next_multiple_of(KEEP_FROM)], ptr::null_mut())?,
    };
    let array = new(py, [count], owner.data())?;
    let base = Bound::new(py, Memory { owner: Some(owner.unbind()) })?;
    // SAFETY: the array was made here and has no base yet; the call takes over the reference to the base, also if it fails.
    if unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), base.into_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    fill(&array, work)?;
    Ok(array)
}

/// A free array of at least `count` elements and at most twice as many.
fn take(py: Python<'_>, count: usize) -> Option<Bound<'_, PyArray1<i32>>> {
    // Taken by another thread or, after a fork, for ever: not worth waiting for.
    let mut free = FREE.try_lock().ok()?;
    // The newest: its pages may still be in the cache.
    let at = free.iter().rposition(|array| (count..=2 * count).contains(&array.bind(py).len()))?;
    Some(free.remove(at).into_bound(py))
}

/// An array over `data`, which the caller answers for, or of numpy's own memory; with nothing in it yet, or `MemoryError`.
fn new<T: Element, D: IntoDimension>(
    py: Python<'_>,
    shape: D,
    data: *mut T,
) -> PyResult<Bound<'_, PyArray<T, D::Dim>>> {
    let mut shape = shape.into_dimension();
    let flags = if data.is_null() { 0 } else { npyffi::NPY_ARRAY_CARRAY };
    // SAFETY: numpy makes an array, or sets an error; the crate's way of making one panics then.
    unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            get_type_object(py, NpyTypes::PyArray_Type),
            T::get_dtype(py).into_dtype_ptr(),
            shape.ndim_cint(),
            shape.as_dims_ptr(),
            ptr::null_mut(),
            data.cast::<c_void>(),
            flags,
            ptr::null_mut(),
        );
        Ok(Bound::from_owned_ptr_or_err(py, array)?.cast_into_unchecked())
    }
}

fn fill<T: Element, D: Dimension>(
    array: &Bound<'_, PyArray<T, D>>,
    work: impl FnOnce(&mut [MaybeUninit<T>]) -> usize,
) -> PyResult<()> {
    let count = array.len();
    // SAFETY: the array is contiguous and of `count` elements, and nobody else refers to its memory: it is new, or over an
    // array that only `FREE` had and now only its base has, which no Python code can reach. Nobody sees an element before it
    // is written.
    let slots = unsafe { std::slice::from_raw_parts_mut(array.data().cast::<MaybeUninit<T>>(), count) };
    match work(slots) {
        written if written == count => Ok(()),
        written => Err(PyRuntimeError::new_err(format!("wrote {written} of {count} elements"))),
    }
}
