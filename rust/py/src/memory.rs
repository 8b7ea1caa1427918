//! Memory for what calls return: numpy's, and used again where asking the system for it would cost more than writing it.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Mutex;

use numpy::ndarray::{Dimension, IntoDimension};
use numpy::npyffi::{NpyTypes, PY_ARRAY_API, get_type_object};
use numpy::{Element, PyArray, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArrayMethods, ToNpyDims};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PySlice;

/// Indices of arrays that are kept: below it the allocator has warm memory anyway.
const KEEP_FROM: usize = 1 << 13;
/// Indices that are kept at most, 128 MiB: both sides of ten million.
const KEEP: usize = 1 << 25;

/// Arrays whose memory is used again. Callers get slices of them; an array that nothing but this list refers to is free.
static KEPT: Mutex<Vec<Py<PyArray1<i32>>>> = Mutex::new(Vec::new());

/// An array that `work` writes, all of it; it returns how many elements it has written, from the front.
pub fn written<T: Element, D: IntoDimension>(
    py: Python<'_>,
    shape: D,
    work: impl FnOnce(&mut [MaybeUninit<T>]) -> usize,
) -> PyResult<Bound<'_, PyArray<T, D::Dim>>> {
    let array = new(py, shape)?;
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
    let array = if (KEEP_FROM..=KEEP).contains(&count) { kept(py, count)? } else { new(py, [count])? };
    fill(&array, work)?;
    Ok(array)
}

/// A slice of a free array, which is made if none fits.
fn kept(py: Python<'_>, count: usize) -> PyResult<Bound<'_, PyArray1<i32>>> {
    // Taken by another thread or, after a fork, for ever: not worth waiting for.
    let Ok(mut kept) = KEPT.try_lock() else { return new(py, [count]) };
    let size = |array: &Py<PyArray1<i32>>| array.bind(py).len();
    // SAFETY: the array is alive, and its count does not change while the interpreter lock is held here.
    let free = |array: &Py<PyArray1<i32>>| unsafe { ffi::Py_REFCNT(array.as_ptr()) } == 1;
    let fits = |array: &&Py<PyArray1<i32>>| (count..=2 * count).contains(&size(array)) && free(array);
    let owner = if let Some(array) = kept.iter().find(fits) {
        array.bind(py).clone()
    } else {
        let owner = new(py, [count.next_multiple_of(KEEP_FROM)])?;
        while kept.iter().map(size).sum::<usize>() + owner.len() > KEEP {
            let Some(oldest) = kept.iter().position(free) else { return slice(&owner, count) };
            kept.remove(oldest);
        }
        kept.push(owner.clone().unbind());
        owner
    };
    slice(&owner, count)
}

fn slice<'py>(owner: &Bound<'py, PyArray1<i32>>, count: usize) -> PyResult<Bound<'py, PyArray1<i32>>> {
    Ok(owner.get_item(PySlice::new(owner.py(), 0, count as isize, 1))?.cast_into()?)
}

/// An array with nothing in it yet, or `MemoryError`.
fn new<T: Element, D: IntoDimension>(py: Python<'_>, shape: D) -> PyResult<Bound<'_, PyArray<T, D::Dim>>> {
    let mut shape = shape.into_dimension();
    // SAFETY: numpy makes an array of its own memory, or sets an error; the crate's way of making one panics then.
    unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            get_type_object(py, NpyTypes::PyArray_Type),
            T::get_dtype(py).into_dtype_ptr(),
            shape.ndim_cint(),
            shape.as_dims_ptr(),
            ptr::null_mut(),
            ptr::null_mut(),
            0,
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
    // SAFETY: the array is contiguous and of `count` elements, and nobody else refers to its memory: it is new, or a slice
    // of one that nothing but `KEPT` referred to. Nobody sees an element before it is written.
    let slots = unsafe { std::slice::from_raw_parts_mut(array.data().cast::<MaybeUninit<T>>(), count) };
    match work(slots) {
        written if written == count => Ok(()),
        written => Err(PyRuntimeError::new_err(format!("wrote {written} of {count} elements"))),
    }
}
