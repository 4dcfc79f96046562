//! Hints: envelopes of actions in the forms that Python has, the limits of a pool, and its
//! sessions.

use kvpool::Sequence;
use kvpool::hints::HintLimits;
use kvpool::prefix::policy::Millis;
use kvpool_node::hints::{EnvelopeError, HintAction, HintsEnvelope};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyAttributeError, PyKeyError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyMapping, PySequence as Items, PyString};
use serde_json::{Map, Value};

use crate::args::{Bytes, Seconds, shown};
use crate::call::Call;
use crate::error::{Failure, Outcome, fields, kind, raise};
use crate::grouped::PyGroupedSequence;
use crate::node::{Json, PyNode};
use crate::pool::PyPool;
use crate::prefix::PyPrefixCache;
use crate::record::record;
use crate::sequence::PySequence;

/// Maximum depth of nested values in a payload; those that are understood have three levels.
const DEPTH_MAX: usize = 16;

record! {
    /// A session, as a pool with hints knows it. Times are milliseconds of the cache's clock, which
    /// `PrefixCache.now_ms` reads.
    SessionInfo {
        /// Its number.
        id: u64,
        /// Number of its requests that were closed.
        requests: u64,
        /// Blocks of its last closed request that are cached, in all groups of layers.
        cached_blocks: usize,
        /// Bytes of these blocks; a block that several sessions share counts for each.
        cached_bytes: u64,
        /// When its last request was closed.
        last_use_ms: u64,
        /// When its next request is expected.
        returns_at_ms: Option<u64>,
        /// Until when its blocks are retained or pinned.
        retained_until_ms: Option<u64>,
        /// Bytes that it has pinned until then.
        pinned_bytes: u64,
    }
}

impl From<kvpool::hints::SessionInfo> for SessionInfo {
    fn from(session: kvpool::hints::SessionInfo) -> Self {
        Self {
            id: session.id.0,
            requests: session.requests,
            cached_blocks: session.cached_blocks,
            cached_bytes: session.cached_bytes,
            last_use_ms: session.last_use.0,
            returns_at_ms: session.returns_at.map(|at| at.0),
            retained_until_ms: session.retained_until.map(|until| until.0),
            pinned_bytes: session.pinned_bytes,
        }
    }
}

/// Reads the argument `hints` of a pool's constructor: True, or a mapping with limits.
pub fn limits(hints: Option<&Bound<'_, PyAny>>) -> Outcome<Option<HintLimits>> {
    let Some(hints) = hints else { return Ok(None) };
    if let Ok(is_on) = hints.extract::<bool>() {
        return Ok(is_on.then(HintLimits::new));
    }
    let refused = |message: String| raise("BuildError", message, fields![kind: "Hints", argument: "hints"]);
    let Ok(given) = hints.cast::<PyMapping>() else {
        let message = format!("hints are True, False or a mapping with limits, not {}", shown(hints));
        return Err(refused(message));
    };
    let mut limits = HintLimits::new();
    for item in given.items()?.iter() {
        let (key, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        limits = match key.extract::<String>().as_deref() {
            Ok("pinned_bytes") => limits.pinned_bytes(value.extract::<Bytes>()?.0),
            Ok("session_bytes") => limits.session_bytes(value.extract::<Bytes>()?.0),
            Ok("tenant_bytes") => limits.tenant_bytes(value.extract::<Bytes>()?.0),
            Ok("longest") => limits.longest(value.extract::<Seconds>()?.0),
            _ => {
                let known = "there are pinned_bytes, session_bytes, tenant_bytes and longest";
                return Err(refused(format!("hints have no limit {}; {known}", shown(&key))));
            }
        };
    }
    Ok(Some(limits))
}

impl From<EnvelopeError> for Failure {
    fn from(error: EnvelopeError) -> Self {
        raise("InvalidArgument", &error, fields![kind: kind(&error), argument: "envelope"])
    }
}

fn malformed(what: impl std::fmt::Display) -> Failure {
    EnvelopeError::Malformed(what.to_string()).into()
}

/// Reads an envelope: a mapping, an object with the same attributes, or MessagePack in a buffer.
fn envelope(given: &Bound<'_, PyAny>) -> Outcome<HintsEnvelope> {
    if let Ok(packed) = PyBuffer::<u8>::get(given) {
        return Ok(HintsEnvelope::from_msgpack(&packed.to_vec(given.py())?)?);
    }
    let actions = member(given, "actions", "the envelope")?;
    let Some(actions) = list(&actions) else {
        return Err(malformed(format_args!("actions are a list, not {}", kind_of(&actions))));
    };
    let mut all = Vec::new();
    for (number, action) in actions.try_iter()?.enumerate() {
        let (action, at) = (action?, format!("actions[{number}]"));
        all.push(HintAction {
            action_id: text(&action, "action_id", &at)?,
            action_type: text(&action, "action_type", &at)?,
            action_version: text(&action, "action_version", &at)?,
            payload: json(&member(&action, "payload", &at)?, &format!("{at}.payload"), 0)?,
        });
    }
    Ok(HintsEnvelope {
        protocol_version: text(given, "protocol_version", "the envelope")?,
        message_id: text(given, "message_id", "the envelope")?,
        actions: all,
    })
}

/// Returns the key of a mapping, or the attribute of another object.
fn member<'py>(of: &Bound<'py, PyAny>, name: &str, at: &str) -> Outcome<Bound<'py, PyAny>> {
    let found = if of.cast::<PyMapping>().is_ok() { of.get_item(name) } else { of.getattr(name) };
    found.map_err(|error| {
        let is_missing =
            error.is_instance_of::<PyKeyError>(of.py()) || error.is_instance_of::<PyAttributeError>(of.py());
        match is_missing {
            true => malformed(format_args!("{at} has no {name}; it is of {}", kind_of(of))),
            false => error.into(),
        }
    })
}

fn text(of: &Bound<'_, PyAny>, name: &str, at: &str) -> Outcome<String> {
    let value = member(of, name, at)?;
    value.extract().map_err(|_| malformed(format_args!("{name} of {at} is text, not {}", kind_of(&value))))
}

/// The type as a message shows it.
fn kind_of(value: &Bound<'_, PyAny>) -> String {
    value.get_type().to_string()
}

/// Returns a list, a tuple or another sequence of objects.
fn list<'a, 'py>(value: &'a Bound<'py, PyAny>) -> Option<&'a Bound<'py, Items>> {
    let is_list = !value.is_instance_of::<PyString>() && PyBuffer::<u8>::get(value).is_err();
    value.cast::<Items>().ok().filter(|_| is_list)
}

/// Reads a value of a payload.
fn json(value: &Bound<'_, PyAny>, at: &str, depth: usize) -> Outcome<Value> {
    if depth > DEPTH_MAX {
        return Err(malformed(format_args!("{at} has more than {DEPTH_MAX} levels")));
    }
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(value) = value.cast::<PyBool>() {
        return Ok(Value::Bool(value.is_true()));
    }
    if value.is_instance_of::<PyString>() {
        let text = value.extract().map_err(|_| malformed(format_args!("{at} cannot be written in UTF-8")))?;
        return Ok(Value::String(text));
    }
    if let Ok(mapping) = value.cast::<PyMapping>() {
        return object(mapping.items()?.as_any(), at, depth);
    }
    if let Some(items) = list(value) {
        let items = items.try_iter()?.enumerate();
        let items = items.map(|(number, item)| json(&item?, &format!("{at}[{number}]"), depth + 1));
        return Ok(Value::Array(items.collect::<Outcome<_>>()?));
    }
    if let Some(attributes) = attributes(value)? {
        return object(attributes.items().as_any(), at, depth);
    }
    number(value).ok_or_else(|| {
        let is_number = value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>();
        let what = if is_number { shown(value) } else { format!("of {}", kind_of(value)) };
        malformed(format_args!("{at} cannot be {what}"))
    })
}

/// Reads pairs of a name and a value.
fn object(items: &Bound<'_, PyAny>, at: &str, depth: usize) -> Outcome<Value> {
    let mut object = Map::new();
    for item in items.try_iter()? {
        let (key, value) = item?.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let name: String = key
            .extract()
            .map_err(|_| malformed(format_args!("{at} has a key that is not text: {}", shown(&key))))?;
        let value = json(&value, &format!("{at}.{name}"), depth + 1)?;
        object.insert(name, value);
    }
    Ok(Value::Object(object))
}

/// Reads a finite number, also one of numpy.
fn number(value: &Bound<'_, PyAny>) -> Option<Value> {
    if value.is_instance_of::<PyInt>() || value.hasattr("__index__").unwrap_or(false) {
        let signed = || value.extract::<i64>().map(Value::from);
        return value.extract::<u64>().map(Value::from).or_else(|_| signed()).ok();
    }
    serde_json::Number::from_f64(value.extract().ok()?).map(Value::Number)
}

/// Returns the fields of a dataclass or of a `msgspec.Struct` by name.
fn attributes<'py>(value: &Bound<'py, PyAny>) -> Outcome<Option<Bound<'py, PyDict>>> {
    for names in ["__struct_fields__", "__dataclass_fields__"] {
        let Some(names) = value.getattr_opt(names)? else { continue };
        let attributes = PyDict::new(value.py());
        for name in names.try_iter()? {
            let name = name?.extract::<String>()?;
            attributes.set_item(&name, value.getattr(name.as_str())?)?;
        }
        return Ok(Some(attributes));
    }
    Ok(None)
}

#[pymethods]
impl PyPool {
    /// Carries out the hints in an envelope about the future use of cached blocks, in order, and
    /// returns what became of them: `{"message_id": ..., "outcomes": [{"action_id": ...,
    /// "outcome": "accepted", "blocks": 25}, ...]}`. Releases the GIL.
    ///
    /// The envelope is that of vLLM and Dynamo: a mapping, an object with its attributes (vLLM's
    /// `KvHintsEnvelope`), or MessagePack in a bytes-like object. It has `protocol_version`,
    /// `message_id` and `actions` of `action_id`, `action_type`, `action_version` and `payload`.
    /// The payload names the blocks by `session_id`, by `block_hashes`, or by `sequence_id` with
    /// `start` and `end`; types are kv.retain (`priority`, `ttl_seconds`), kv.pin (`ttl_seconds`),
    /// kv.demote, kv.evict, kv.prefetch and kv.release. A prefetch is for `Node.hint`, of a node
    /// with a tier; here it is rejected.
    ///
    /// The outcome is "accepted", "clipped" (granted in part, `until` a time of the cache's clock),
    /// "deferred" (until owners release the blocks), "missing", or "rejected", with `reason` and
    /// `detail`: also for an action that is not understood, and for all in a pool without hints.
    /// Raises InvalidArgument for an envelope that is refused as a whole.
    fn hint(&self, py: Python<'_>, envelope: &Bound<'_, PyAny>) -> Outcome<Json> {
        let (pool, envelope) = (self.share()?, self::envelope(envelope)?);
        let answer = py.detach(|| envelope.carry_out(&pool).map(serde_json::to_value))?;
        Ok(Json(answer.map_err(|error| raise("KvPoolError", error, Vec::new()))?))
    }

    /// Returns the sessions of a pool with hints, those used last first; 65,536 of them are
    /// remembered. Looks all of their blocks up: for diagnosis, not for every step.
    fn sessions(&self, py: Python<'_>) -> Outcome<Vec<SessionInfo>> {
        let pool = self.share()?;
        Ok(py.detach(|| pool.sessions()).into_iter().map(SessionInfo::from).collect())
    }
}

#[pymethods]
impl PyNode {
    /// Carries out hints as `Pool.hint` of the node's pool, and prefetches (kv.prefetch) by
    /// fetching the blocks from the node's tier in the background. As `POST /hints`. Raises
    /// InvalidArgument at once for an envelope that is refused as a whole.
    fn hint(slf: &Bound<'_, Self>, envelope: &Bound<'_, PyAny>) -> Outcome<Call> {
        let envelope = self::envelope(envelope)?;
        envelope.check()?;
        Self::call(slf, async move |node| {
            let answer = node.admin().hints(envelope).await;
            let answer = answer.map_err(|error| raise("NodeError", error, fields![kind: "Admin"]))?;
            let answer = serde_json::to_value(answer);
            Ok(Json(answer.map_err(|error| raise("KvPoolError", error, Vec::new()))?))
        })
    }
}

/// Returns the time that is `seconds` from now, on the clock of the cache of a sequence's pool.
fn from_now(sequence: &Sequence, seconds: Seconds) -> Option<Millis> {
    let now = sequence.pool()?.prefix_cache()?.now();
    Some(now + seconds.0.as_millis().try_into().unwrap_or(u64::MAX))
}

#[pymethods]
impl PySequence {
    /// Tells that the next request of its session is expected in `seconds` seconds: when a tool
    /// that it calls returns, for example. Takes effect when the sequence is closed, with policies
    /// that use it and in `SessionInfo.returns_at_ms`; has no effect without a prefix cache.
    fn expect_return(&self, seconds: Seconds) -> Outcome<()> {
        let mut sequence = self.sequence.enter()?;
        if let Some(at) = from_now(&sequence, seconds) {
            sequence.expect_return(at);
        }
        Ok(())
    }
}

#[pymethods]
impl PyGroupedSequence {
    /// Tells that the next request of its session is expected in `seconds` seconds: when a tool
    /// that it calls returns, for example. Takes effect when the sequence is closed, with policies
    /// that use it and in `SessionInfo.returns_at_ms`; has no effect without a prefix cache.
    fn expect_return(&self, seconds: Seconds) -> Outcome<()> {
        let mut sequence = self.sequence.enter()?;
        if let Some(at) = from_now(sequence.group(0), seconds) {
            sequence.expect_return(at);
        }
        Ok(())
    }
}

#[pymethods]
impl PyPrefixCache {
    /// The time of the cache's clock in milliseconds, as in the answers of `Pool.hint` and in
    /// `SessionInfo`.
    #[getter]
    fn now_ms(&self) -> Outcome<u64> {
        let pool = self.pool()?;
        Ok(pool.prefix_cache().map_or(0, |cache| cache.now().0))
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SessionInfo>()
}
