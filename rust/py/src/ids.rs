//! Reading block ids and counts: which Python objects are accepted, and what is said about the others.

use nixl_fast_core::{Error, Ids, Plan, Side};
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};

use crate::errors::{block_id, pairing, to_py};

/// One list of ids per group of `plan`.
pub fn read_groups(lists: &Bound<'_, PyAny>, plan: &Plan, side: Side) -> PyResult<Vec<Vec<u32>>> {
    let py = lists.py();
    let lists = items(lists).ok_or_else(|| {
        let got = kind(lists);
        block_id(py, format!("{side} block ids must be a list or tuple with one list of ids per group, got {got}"))
    })?;
    let expected = plan.groups().len();
    if lists.len() != expected {
        return Err(to_py(py, &Error::GroupCount { side, got: lists.len(), expected }));
    }
    let read_one =
        |(group, list)| read(list, Ids { side: Some(side), group: Some(group) }, plan.limit(side, group).into());
    lists.iter().enumerate().map(read_one).collect()
}

/// The ids of one list; range checks against `limit` are the core's, here it only completes messages.
pub fn read(list: &Bound<'_, PyAny>, ids: Ids, limit: u64) -> PyResult<Vec<u32>> {
    if let Ok(list) = list.cast::<PyList>() {
        return read_list(list, ids, limit);
    }
    if let Ok(list) = list.cast::<PyTuple>() {
        return list.iter().enumerate().map(|(position, item)| read_item(&item, ids, position, limit)).collect();
    }
    if let Ok(array) = list.cast::<PyUntypedArray>() {
        if !list.is_exact_instance_of::<PyUntypedArray>() && list.hasattr("mask")? {
            return Err(block_id(list.py(), format!("{ids} must have no mask, got {}", kind(list))));
        }
        if array.ndim() != 1 {
            return Err(block_id(list.py(), format!("{ids} must be 1-D, got an array of shape {:?}", array.shape())));
        }
        let done = read_array::<i64>(list, ids, limit)
            .or_else(|| read_array::<i32>(list, ids, limit))
            .or_else(|| read_array::<u32>(list, ids, limit))
            .or_else(|| read_array::<u64>(list, ids, limit))
            .or_else(|| read_array::<i16>(list, ids, limit))
            .or_else(|| read_array::<u16>(list, ids, limit))
            .or_else(|| read_array::<i8>(list, ids, limit))
            .or_else(|| read_array::<u8>(list, ids, limit));
        return done.unwrap_or_else(|| {
            let message =
                format!("{ids} must hold integers in native byte order, got an array of dtype {}", array.dtype());
            Err(block_id(list.py(), message))
        });
    }
    let message = format!("{ids} must be a list, a tuple or a 1-D integer array, got {}", kind(list));
    Err(block_id(list.py(), message))
}

/// A count that is a non-negative integer.
pub fn count(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    let number = integer(value).and_then(|number| number.extract::<u64>().ok());
    number.ok_or_else(|| pairing(value.py(), format!("{name} must be an integer of 0 or more, got {}", shown(value))))
}

/// `num_computed_blocks`: one count or None per group.
pub fn read_computed(value: &Bound<'_, PyAny>) -> PyResult<Vec<Option<u32>>> {
    let one = |(group, item): (usize, &Bound<'_, PyAny>)| {
        if item.is_none() {
            return Ok(None);
        }
        let name = format!("num_computed_blocks[{group}]");
        let number = count(item, &name)?;
        let number = u32::try_from(number);
        number.map(Some).map_err(|_| pairing(item.py(), format!("{name} must be below 2^32, got {}", shown(item))))
    };
    if let Some(items) = items(value) {
        return items.iter().enumerate().map(one).collect();
    }
    if let Ok(array) = value.cast::<PyUntypedArray>()
        && array.ndim() == 1
    {
        let items = value.try_iter()?.collect::<PyResult<Vec<_>>>()?;
        return items.iter().enumerate().map(one).collect();
    }
    Err(pairing(
        value.py(),
        format!("num_computed_blocks must be a list or tuple with one count per group, got {}", kind(value)),
    ))
}

fn items<'py>(value: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    let list = value.cast::<PyList>().map(|list| list.iter().collect());
    list.or_else(|_| value.cast::<PyTuple>().map(|tuple| tuple.iter().collect())).ok()
}

fn read_list(list: &Bound<'_, PyList>, ids: Ids, limit: u64) -> PyResult<Vec<u32>> {
    let count = list.len();
    let mut out = Vec::with_capacity(count);
    while out.len() < count {
        let position = out.len();
        // SAFETY: the position is below the list's length, which is still `count`: only the slow way below runs Python
        // code, and looks at the length after it; the interpreter lock is held. The item is borrowed from the list and
        // not kept, and reading an exact int runs no Python code that could change the list.
        // It pays: the safe way costs 12 ns an id instead of about 5, for the many thousand ids of a long request.
        let quick = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), position as ffi::Py_ssize_t);
            if ffi::PyLong_CheckExact(item) == 0 { -1 } else { ffi::PyLong_AsLongLong(item) }
        };
        if let Ok(id) = u32::try_from(quick) {
            out.push(id);
        } else {
            // Not a plain id after all: say what it is. An int beyond 64 bits has set an error.
            drop(PyErr::take(list.py()));
            out.push(read_item(&list.get_item(position)?, ids, position, limit)?);
            if list.len() != count {
                let message = format!("{ids} changed from {count} to {} ids while being read", list.len());
                return Err(block_id(list.py(), message));
            }
        }
    }
    Ok(out)
}

fn read_item(item: &Bound<'_, PyAny>, ids: Ids, position: usize, limit: u64) -> PyResult<u32> {
    if item.is_exact_instance_of::<PyInt>()
        && let Ok(id) = item.extract::<u32>()
    {
        return Ok(id);
    }
    let Some(number) = integer(item) else {
        let message =
            format!("block id at position {position} of {ids} must be an integer below {limit}, got {}", shown(item));
        return Err(block_id(item.py(), message));
    };
    number.extract::<u32>().map_err(|_| to_py(item.py(), &outside(digits(&number), ids, position, limit)))
}

/// An int as text; Python writes none that is very long.
fn digits(number: &Bound<'_, PyAny>) -> String {
    let long = |_| {
        let sign = if number.lt(0).unwrap_or(false) { "-" } else { "" };
        let bits = number.call_method0("bit_length").and_then(|bits| bits.extract::<u64>()).unwrap_or(1);
        format!("{sign}2^{} or beyond", bits.saturating_sub(1))
    };
    number.str().map_or_else(long, |text| text.to_string())
}

/// The refusal of an integer that is no u32.
fn outside(value: String, ids: Ids, position: usize, limit: u64) -> Error {
    if value.starts_with('-') {
        Error::IdNegative { ids, position, value, limit }
    } else {
        Error::IdTooLarge { ids, position, value, limit }
    }
}

/// `item` as a Python int, if it is one of the integer types; a bool is none.
pub fn integer<'py>(item: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    if item.is_instance_of::<PyBool>() {
        return None;
    }
    if item.is_instance_of::<PyInt>() {
        return Some(item.clone());
    }
    // numpy scalars: integers have __index__, floats and bools have not.
    let number = item.call_method0("__index__").ok()?;
    (number.is_instance_of::<PyInt>() && !number.is_instance_of::<PyBool>()).then_some(number)
}

fn read_array<T>(list: &Bound<'_, PyAny>, ids: Ids, limit: u64) -> Option<PyResult<Vec<u32>>>
where
    T: Element + Copy + std::fmt::Display,
    u32: TryFrom<T>,
{
    let array = list.cast::<PyArray1<T>>().ok()?;
    let convert = || {
        let array = array.try_readonly().map_err(|error| block_id(list.py(), format!("{ids}: {error}")))?;
        let array = array.as_array();
        let out: Vec<u32> = match array.as_slice() {
            Some(values) => values.iter().map(|value| u32::try_from(*value).unwrap_or(u32::MAX)).collect(),
            None => array.iter().map(|value| u32::try_from(*value).unwrap_or(u32::MAX)).collect(),
        };
        // No table reaches u32::MAX, so where it stands for a value that is no u32, the value is named here.
        if !out.contains(&u32::MAX) || array.iter().all(|value| u32::try_from(*value).is_ok()) {
            return Ok(out);
        }
        let bad = array.iter().enumerate().find(|(_, value)| u32::try_from(**value).is_err());
        let (position, value) = bad.map_or((0, String::new()), |(position, value)| (position, value.to_string()));
        Err(to_py(list.py(), &outside(value, ids, position, limit)))
    };
    Some(convert())
}

fn kind(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}

/// A value as error messages show it.
pub fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    format!("{} ({})", text.chars().take(60).collect::<String>(), kind(value))
}
