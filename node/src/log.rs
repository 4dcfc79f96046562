//! The text of log messages, for the program and the Python package.

use std::fmt::{Debug, Write};

use tracing::Event;
use tracing::field::{Field, Visit};

/// The message of an event, and `, name: value` for each field.
#[derive(Default)]
pub struct Text {
    /// The message.
    pub message: String,
    /// The fields, in the order of the event.
    pub fields: String,
}

impl Text {
    /// Reads an event.
    pub fn of(event: &Event<'_>) -> Self {
        let mut text = Self::default();
        event.record(&mut text);
        text
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name}: {value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
