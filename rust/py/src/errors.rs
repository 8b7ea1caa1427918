//! The one place where errors cross into Python.

use nixl_fast_core::Error;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static GEOMETRY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static BLOCK_ID: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static PAIRING: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The Python exception for a refusal of the core.
pub fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let (cell, name) = match error {
        Error::IdTooLarge { .. } | Error::IdNegative { .. } | Error::IdRepeated { .. } | Error::GroupCount { .. } => {
            (&BLOCK_ID, "BlockIdError")
        }
        Error::Invalid { .. }
        | Error::StrideTooSmall { .. }
        | Error::AddressOverflow { .. }
        | Error::TooManyDescriptors { .. } => (&GEOMETRY, "GeometryError"),
        Error::OutOfMemory { .. } => return PyMemoryError::new_err(error.to_string()),
        Error::Pairing { .. } | Error::ComputedCount { .. } => (&PAIRING, "PairingError"),
    };
    raise(py, cell, name, error.to_string())
}

/// A `BlockIdError` for an object that is no list of ids.
pub fn block_id(py: Python<'_>, message: String) -> PyErr {
    raise(py, &BLOCK_ID, "BlockIdError", message)
}

/// A `PairingError` for a count that is none.
pub fn pairing(py: Python<'_>, message: String) -> PyErr {
    raise(py, &PAIRING, "PairingError", message)
}

fn raise(py: Python<'_>, cell: &'static PyOnceLock<Py<PyType>>, name: &str, message: String) -> PyErr {
    match cell.import(py, "nixl_fast.errors", name) {
        Ok(class) => PyErr::from_type(class.clone(), message),
        Err(error) => error,
    }
}
