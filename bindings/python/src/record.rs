//! Records: results with named fields, for example statistics and reports.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Defines a class with read-only attributes, `as_dict`, equality, a representation and pickling.
macro_rules! record {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[pyo3::pyclass(frozen, get_all, eq, module = "kvpool._kvpool")]
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        #[pyo3::pymethods]
        impl $name {
            /// Returns the attributes by name.
            fn as_dict<'py>(
                &self,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::types::PyDict>> {
                use pyo3::types::PyDictMethods;
                let dict = pyo3::types::PyDict::new(py);
                $(dict.set_item(stringify!($field), self.$field.clone())?;)*
                Ok(dict)
            }

            /// Makes a record again from its attributes, for `pickle` and `copy`.
            #[classmethod]
            fn _restore(
                _class: &pyo3::Bound<'_, pyo3::types::PyType>,
                fields: &pyo3::Bound<'_, pyo3::types::PyDict>,
            ) -> pyo3::PyResult<Self> {
                Ok(Self { $($field: $crate::record::restored(fields, stringify!($field))?,)* })
            }

            fn __reduce__<'py>(
                slf: &pyo3::Bound<'py, Self>,
            ) -> pyo3::PyResult<(pyo3::Bound<'py, pyo3::PyAny>, (pyo3::Bound<'py, pyo3::types::PyDict>,))> {
                use pyo3::types::PyAnyMethods;
                Ok((slf.get_type().getattr("_restore")?, (slf.get().as_dict(slf.py())?,)))
            }

            fn __repr__(&self) -> String {
                let mut fields = Vec::new();
                $(fields.push(format!(concat!(stringify!($field), "={}"), $crate::record::Text(&self.$field)));)*
                format!(concat!(stringify!($name), "({})"), fields.join(", "))
            }
        }
    };
}
pub(crate) use record;

/// Reads a field of a pickled record.
pub fn restored<'py, T: FromPyObjectOwned<'py>>(fields: &Bound<'py, PyDict>, name: &str) -> PyResult<T> {
    let missing = || PyValueError::new_err(format!("the record has no {name}: another version pickled it"));
    fields.get_item(name)?.ok_or_else(missing)?.extract().map_err(Into::into)
}

/// Writes a field as Python does, as far as records need it.
pub struct Text<'a, T>(pub &'a T);

impl<T: std::fmt::Debug> std::fmt::Display for Text<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!("{:?}", self.0);
        match text.as_str() {
            "true" => f.write_str("True"),
            "false" => f.write_str("False"),
            text => f.write_str(
                text.strip_prefix("Some(").and_then(|some| some.strip_suffix(')')).unwrap_or(text),
            ),
        }
    }
}
