//! The names of the columns of a CSV trace.

use std::str::FromStr;

use thiserror::Error;

/// The columns that are read, by the names that the header gives them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Columns {
    /// When the request came.
    pub arrival: String,
    /// Tokens of the prompt.
    pub input: String,
    /// Tokens of the answer.
    pub output: String,
}

impl Default for Columns {
    /// The names in Azure's traces.
    fn default() -> Self {
        let [arrival, input, output] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"].map(str::to_owned);
        Self { arrival, input, output }
    }
}

impl Columns {
    /// The names, in the order of a row's fields.
    pub(super) fn names(&self) -> [&str; 3] {
        [&self.arrival, &self.input, &self.output]
    }
}

/// Why a text does not name columns.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ColumnsError {
    /// An item is not a field, an equals sign and a name.
    #[error("\"{item}\" is not written as field=NAME")]
    Item {
        /// The item.
        item: String,
    },
    /// No field has this name.
    #[error("no field is called \"{field}\"; there are arrival, input and output")]
    Field {
        /// The name given.
        field: String,
    },
    /// A field is named again.
    #[error("{field} is named twice")]
    Twice {
        /// The field.
        field: String,
    },
}

impl FromStr for Columns {
    type Err = ColumnsError;

    /// `arrival=NAME,input=NAME,output=NAME`; a field that is left out has the name that Azure's
    /// traces give it.
    fn from_str(text: &str) -> Result<Self, ColumnsError> {
        let mut columns = Self::default();
        let mut named = Vec::new();
        for item in text.split(',') {
            let (field, name) = match item.split_once('=').map(|(field, name)| (field.trim(), name.trim())) {
                Some((field, name)) if !name.is_empty() => (field, name),
                _ => return Err(ColumnsError::Item { item: item.to_owned() }),
            };
            let column = match field {
                "arrival" => &mut columns.arrival,
                "input" => &mut columns.input,
                "output" => &mut columns.output,
                _ => return Err(ColumnsError::Field { field: field.to_owned() }),
            };
            if named.contains(&field) {
                return Err(ColumnsError::Twice { field: field.to_owned() });
            }
            name.clone_into(column);
            named.push(field);
        }
        Ok(columns)
    }
}
