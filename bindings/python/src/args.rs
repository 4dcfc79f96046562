//! Arguments of calls: numbers, priorities, times and keys, each refused with a message of ours.

use std::time::{Duration, Instant};

use kvpool::prefix::PrefixKeys;
use kvpool::{AllocRequest, Priority, SequenceId};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{Outcome, fields, invalid, raise};

/// Reads a number from 0 to `max`.
fn number(obj: &Borrowed<'_, '_, PyAny>, what: &'static str, max: u64) -> PyResult<u64> {
    match obj.extract::<u64>() {
        Ok(value) if value <= max => Ok(value),
        Err(error) if !error.is_instance_of::<PyOverflowError>(obj.py()) => Err(error),
        _ => {
            let value = obj.str().map(|text| text.to_string()).unwrap_or_default();
            let message = format!("{what} cannot be {value}; it is from 0 to {max}");
            Err(raise("InvalidArgument", message, fields![max: max]).into())
        }
    }
}

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident($int:ty) $what:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name(pub $int);

        impl<'a, 'py> FromPyObject<'a, 'py> for $name {
            type Error = PyErr;

            fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
                Ok(Self(number(&obj, $what, <$int>::MAX as u64)? as $int))
            }
        }
    )*};
}

numbers! {
    /// A number of blocks.
    Blocks(usize) "a number of blocks";
    /// A number of tokens, or a position in a sequence.
    Tokens(usize) "a number of tokens";
    /// The id of a sequence.
    Id(u64) "a sequence id";
    /// A place in a list.
    Place(usize) "an index";
    /// The number of a batch.
    BatchNumber(u64) "the number of a batch";
    /// Some other number of things.
    Count(usize) "a count";
}

/// A priority, by name.
#[derive(Clone, Copy, Default)]
pub struct Rank(pub Priority);

impl<'a, 'py> FromPyObject<'a, 'py> for Rank {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let name = obj.extract::<std::borrow::Cow<'_, str>>()?;
        match &*name {
            "normal" => Ok(Self(Priority::Normal)),
            "high" => Ok(Self(Priority::High)),
            "urgent" => Ok(Self(Priority::Urgent)),
            _ => Err(invalid(format!("unknown priority {name:?}; it is normal, high or urgent")).into()),
        }
    }
}

/// A time in seconds.
#[derive(Clone, Copy)]
pub struct Seconds(pub Duration);

impl<'a, 'py> FromPyObject<'a, 'py> for Seconds {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let seconds = obj.extract::<f64>()?;
        Duration::try_from_secs_f64(seconds)
            .map(Self)
            .map_err(|_| invalid(format!("a time cannot be {seconds} seconds")).into())
    }
}

/// Returns the moment at which a wait of this length ends; `None`: never.
pub fn deadline(timeout: Option<Seconds>) -> Option<Instant> {
    // A time beyond the range of the clock is never reached.
    timeout.and_then(|Seconds(timeout)| Instant::now().checked_add(timeout))
}

/// Makes a request for blocks.
pub fn request(
    blocks: Blocks,
    sequence: Option<Id>,
    priority: Rank,
    pinned: bool,
    contiguous: bool,
) -> AllocRequest {
    let mut request = AllocRequest::new(blocks.0).priority(priority.0);
    request.sequence = sequence.map(|id| SequenceId(id.0));
    (request.pinned, request.contiguous) = (pinned, contiguous);
    request
}

/// What separates equal tokens: salt, tenant and adapter.
#[derive(Clone, Default)]
pub struct Keys {
    salt: Option<Box<[u8]>>,
    tenant: Option<Box<[u8]>>,
    adapter: Option<Box<[u8]>>,
}

impl Keys {
    /// Copies the keys.
    pub fn new(
        salt: Option<&Bound<'_, PyBytes>>,
        tenant: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
    ) -> Self {
        let owned = |bytes: Option<&Bound<'_, PyBytes>>| bytes.map(|bytes| bytes.as_bytes().into());
        Self { salt: owned(salt), tenant: owned(tenant), adapter: owned(adapter) }
    }

    /// Returns the library's form.
    pub fn get(&self) -> PrefixKeys<'_> {
        let mut keys = PrefixKeys::new();
        if let Some(salt) = &self.salt {
            keys = keys.salt(salt);
        }
        if let Some(tenant) = &self.tenant {
            keys = keys.tenant(tenant);
        }
        if let Some(adapter) = &self.adapter {
            keys = keys.adapter(adapter);
        }
        keys
    }
}

/// Checks a range of indices of a list of `len` items; `None` is the end.
pub fn range(start: Place, stop: Option<Place>, len: usize, what: &str) -> Outcome<std::ops::Range<usize>> {
    let (start, stop) = (start.0, stop.map_or(len, |stop| stop.0));
    if start > stop || stop > len {
        return Err(raise(
            "InvalidArgument",
            format!("the range {start}..{stop} is outside of {len} {what}"),
            fields![start: start, stop: stop, length: len],
        ));
    }
    Ok(start..stop)
}
