//! Arguments of calls: numbers, priorities, times and keys, each refused with a message of ours.

use std::time::{Duration, Instant};

use kvpool::prefix::{ExtraKey, PrefixKeys};
use kvpool::{AllocRequest, Priority, SequenceId};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes};

use crate::error::{Outcome, fields, invalid, raise};

/// The value as a message shows it.
pub fn shown(obj: &Bound<'_, PyAny>) -> String {
    // Python refuses to write very long numbers.
    obj.repr().map_or_else(|_| "a number of thousands of digits".to_owned(), |text| text.to_string())
}

/// Reads a number from 0 to `max`. True and False, which Python has as numbers, are taken for
/// mistakes.
fn number(obj: &Borrowed<'_, '_, PyAny>, what: &'static str, max: u64) -> PyResult<u64> {
    let is_bool = obj.is_instance_of::<PyBool>();
    match obj.extract::<u64>() {
        Ok(value) if value <= max && !is_bool => Ok(value),
        Err(error) if !error.is_instance_of::<PyOverflowError>(obj.py()) => Err(error),
        _ => {
            let message = format!("{what} cannot be {}; it is from 0 to {max}", shown(obj));
            Err(raise("InvalidArgument", message, fields![max: max]).into())
        }
    }
}

/// Reads a number that may have a fraction.
fn real(obj: &Borrowed<'_, '_, PyAny>, what: &str) -> PyResult<f64> {
    let is_bool = obj.is_instance_of::<PyBool>();
    match obj.extract::<f64>() {
        Ok(value) if !is_bool => Ok(value),
        Err(error) if !error.is_instance_of::<PyOverflowError>(obj.py()) => Err(error),
        _ => Err(invalid(format!("{what} cannot be {}", shown(obj))).into()),
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
    /// A number of frames.
    Frames(usize) "a number of frames";
    /// A frame.
    Frame(u32) "a frame";
    /// The length of a run, in frames.
    RunLength(u32) "the length of a run";
    /// log2 of the length of a run.
    RunOrder(u8) "the order of a run";
    /// A number of tokens, or a position in a sequence.
    Tokens(usize) "a number of tokens";
    /// The id of a sequence.
    Id(u64) "a sequence id";
    /// The number of a pool among those with the same settings.
    PoolNumber(u16) "the number of a pool";
    /// The number of a session.
    Session(u64) "a session";
    /// The number of a tenant.
    Tenant(u64) "a tenant";
    /// A group of layers.
    Group(u32) "a group";
    /// A place in a list.
    Place(usize) "an index";
    /// The number of a batch.
    BatchNumber(u64) "the number of a batch";
    /// The number of a request.
    RequestNumber(u64) "the number of a request";
    /// The address of a stream.
    Stream(usize) "the address of a stream";
    /// A part of a version.
    Version(u32) "a version";
    /// The version of weights.
    Weights(u64) "a version of weights";
    /// A number of bytes.
    Bytes(u64) "a number of bytes";
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
        let seconds = real(&obj, "a time")?;
        Duration::try_from_secs_f64(seconds)
            .map(Self)
            .map_err(|_| invalid(format!("a time cannot be {seconds} seconds")).into())
    }
}

/// A part of a whole, from 0 to 1.
#[derive(Clone, Copy)]
pub struct Share(pub f64);

impl<'a, 'py> FromPyObject<'a, 'py> for Share {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let share = real(&obj, "a share")?;
        if !(0.0..=1.0).contains(&share) {
            return Err(invalid(format!("a share cannot be {share}; it is from 0 to 1")).into());
        }
        Ok(Self(share))
    }
}

/// The key of a hash function.
#[derive(Clone, Copy)]
pub struct Key(pub [u8; 32]);

impl<'a, 'py> FromPyObject<'a, 'py> for Key {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let key = obj.cast::<PyBytes>().map_err(PyErr::from)?;
        let key = key.as_bytes();
        key.try_into()
            .map(Self)
            .map_err(|_| invalid(format!("the hash key has {} bytes; it has 32", key.len())).into())
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

/// Start, end and key of a range of tokens.
pub type Extra<'py> = (Place, Place, Bound<'py, PyBytes>);

/// What separates equal tokens: salt, adapter, and keys of ranges of tokens.
#[derive(Clone, Default)]
pub struct Keys {
    extra: Vec<ExtraKey>,
    salt: Option<Box<[u8]>>,
    adapter: Option<Box<[u8]>>,
}

impl Keys {
    /// Copies the keys.
    pub fn new(
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra: Option<Vec<Extra<'_>>>,
    ) -> Self {
        let owned = |bytes: Option<&Bound<'_, PyBytes>>| bytes.map(|bytes| bytes.as_bytes().into());
        let extra = extra.into_iter().flatten();
        let extra = extra.map(|(start, end, key)| ExtraKey::new(start.0..end.0, key.as_bytes())).collect();
        Self { salt: owned(salt), adapter: owned(adapter), extra }
    }

    /// Returns the library's form.
    pub fn get(&self) -> PrefixKeys<'_> {
        let mut keys = PrefixKeys::new().extra_keys(&self.extra);
        if let Some(salt) = &self.salt {
            keys = keys.salt(salt);
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
