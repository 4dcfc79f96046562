//! Records: results with named fields, for example statistics and reports.

/// Defines a class with read-only attributes, `as_dict` and a representation.
macro_rules! record {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[pyo3::pyclass(frozen, get_all, module = "kvpool._kvpool")]
        #[derive(Clone, Debug)]
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

            fn __repr__(&self) -> String {
                let mut fields = Vec::new();
                $(fields.push(format!(concat!(stringify!($field), "={}"), $crate::record::Text(&self.$field)));)*
                format!(concat!(stringify!($name), "({})"), fields.join(", "))
            }
        }
    };
}
pub(crate) use record;

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
