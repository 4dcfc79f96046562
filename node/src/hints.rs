//! The wire form of [hints](kvpool::hints): an envelope with actions, as vLLM and Dynamo send it,
//! in JSON or MessagePack.
//!
//! ```json
//! {"protocol_version": "1.0", "message_id": "m-1", "actions": [
//!   {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0",
//!    "payload": {"session_id": 7, "priority": 80, "ttl_seconds": 60}},
//!   {"action_id": "b", "action_type": "kv.release", "action_version": "1.0", "payload": {"session_id": 8}}]}
//! ```
//!
//! | action | payload, beside its target |
//! |---|---|
//! | `kv.retain` | `priority`: 1 to 100, above 50 is high, or `low`, `normal`, `high`; 0 demotes. `ttl_seconds` or `duration`; without, for as long as the pool allows |
//! | `kv.pin` | `ttl_seconds` or `duration` |
//! | `kv.demote`, `kv.evict` | |
//! | `kv.prefetch` | `ttl_seconds` or `duration`, up to a minute; of a session, or, of one group of layers, hashes from the first block on |
//! | `kv.release` | |
//!
//! The target is `session_id`, or `block_hashes` of one chain as in events, or `sequence_id` with
//! `start` and `end` in tokens, or, to retain, with `directives` (`start`, `end`, `priority`,
//! `duration`). Ids are numbers, or decimal digits in a string. Other fields are refused.
//!
//! Each action is read and carried out by itself: one that is not understood is rejected, and the
//! others are carried out. An envelope of another major version than 0 or 1 is refused as a whole.

use std::fmt;
use std::time::Duration;

use kvpool::hints::{Action, Hint, Outcome, Rejection, Target};
use kvpool::prefix::BlockHash;
use kvpool::prefix::policy::{CachePriority, Millis};
use kvpool::transfer::PromptBlocks;
use kvpool::{Pool, SequenceId, SessionId};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Number, Value};
use thiserror::Error;

/// Fetches blocks from a tier in the background.
pub trait Prefetch {
    /// Begins to fetch the prefix with these blocks, as far as it arrives in time.
    ///
    /// # Errors
    /// [`Rejection::NoTier`] or [`Rejection::Busy`].
    fn prefetch(&self, blocks: PromptBlocks, within: Duration) -> Result<(), Rejection>;
}

/// Time for a prefetch that names none.
const PREFETCH: Duration = Duration::from_secs(60);

/// Maximum number of actions in an envelope.
pub const ACTIONS_MAX: usize = 256;

/// Maximum number of directives in an action.
pub const DIRECTIVES_MAX: usize = 16;

/// Hints, as they are sent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct HintsEnvelope {
    /// Version of this form.
    pub protocol_version: String,
    /// Names the message in its answer.
    pub message_id: String,
    /// The hints, carried out in order.
    pub actions: Vec<HintAction>,
}

/// A hint, as it is sent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct HintAction {
    /// Names the action in the answer.
    pub action_id: String,
    /// `kv.retain`, for example.
    pub action_type: String,
    /// Version of the payload.
    pub action_version: String,
    /// What it is about.
    #[serde(deserialize_with = "value")]
    pub payload: Value,
}

/// Reads a value. A number that JSON does not have becomes text, which no field takes for a number;
/// by itself, `Value` reads it as null, which stands for no limit.
fn value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
    struct Read(Value);

    impl<'de> Deserialize<'de> for Read {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_any(Values).map(Read)
        }
    }

    struct Values;

    impl<'de> Visitor<'de> for Values {
        type Value = Value;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a value that JSON has")
        }

        fn visit_unit<E>(self) -> Result<Value, E> {
            Ok(Value::Null)
        }

        fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
            let number = Number::from_f64(value).map(Value::Number);
            Ok(number.unwrap_or_else(|| value.to_string().into()))
        }

        fn visit_str<E>(self, value: &str) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
            let mut all = Vec::new();
            while let Some(Read(item)) = items.next_element()? {
                all.push(item);
            }
            Ok(all.into())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
            let mut all = Map::new();
            while let Some((name, Read(item))) = items.next_entry()? {
                all.insert(name, item);
            }
            Ok(all.into())
        }
    }

    Read::deserialize(deserializer).map(|read| read.0)
}

/// What became of the hints in an envelope.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct HintsAnswer {
    /// That of the envelope.
    pub message_id: String,
    /// One or, with directives, more for each action, in order.
    pub outcomes: Vec<ActionOutcome>,
}

/// What became of an action.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ActionOutcome {
    /// That of the action.
    pub action_id: String,
    /// The outcome.
    #[serde(flatten)]
    pub outcome: Told,
}

/// What is told of an action.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Told {
    /// What the pool did.
    Outcome {
        /// The outcome.
        #[serde(flatten)]
        outcome: Outcome,
        /// Why it was rejected.
        #[serde(skip_serializing_if = "Option::is_none")]
        detail: Option<String>,
    },
    /// The action was not understood.
    Malformed {
        /// `rejected`.
        outcome: &'static str,
        /// `malformed`.
        reason: &'static str,
        /// What is wrong, and where.
        detail: String,
    },
}

/// An envelope was refused as a whole.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum EnvelopeError {
    /// It has another version.
    #[error("protocol_version {got:?} is not understood; 0 and 1 are, with any minor version")]
    Version {
        /// The version.
        got: String,
    },
    /// It has too many actions.
    #[error("{got} actions; at most {ACTIONS_MAX} in an envelope")]
    Actions {
        /// Number of actions.
        got: usize,
    },
    /// It is no envelope.
    #[error("no envelope of hints: {0}")]
    Malformed(String),
}

impl HintsEnvelope {
    /// Reads an envelope in MessagePack. For JSON, use its `Deserialize`.
    ///
    /// # Errors
    /// [`EnvelopeError::Malformed`].
    pub fn from_msgpack(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        rmp_serde::from_slice(bytes).map_err(|error| EnvelopeError::Malformed(error.to_string()))
    }

    /// Carries out its actions, in order, without a tier.
    ///
    /// # Errors
    /// If the envelope is refused as a whole: nothing was done.
    pub fn carry_out(&self, pool: &Pool) -> Result<HintsAnswer, EnvelopeError> {
        self.carry_out_with(pool, &NoTier)
    }

    /// Checks what refuses an envelope as a whole.
    ///
    /// # Errors
    /// [`EnvelopeError::Version`], [`EnvelopeError::Actions`].
    pub fn check(&self) -> Result<(), EnvelopeError> {
        if !is_understood(&self.protocol_version) {
            return Err(EnvelopeError::Version { got: self.protocol_version.clone() });
        }
        match self.actions.len() {
            got if got > ACTIONS_MAX => Err(EnvelopeError::Actions { got }),
            _ => Ok(()),
        }
    }

    /// Carries out its actions, in order. A prefetch is deferred: its blocks are on their way.
    ///
    /// # Errors
    /// As for [`carry_out`](Self::carry_out).
    pub fn carry_out_with(&self, pool: &Pool, tier: &dyn Prefetch) -> Result<HintsAnswer, EnvelopeError> {
        self.check()?;
        let now = pool.prefix_cache().map_or(Millis(0), |cache| cache.now());
        let outcomes = self.actions.iter().flat_map(|action| {
            let told = match action.hints(now) {
                Ok(hints) => {
                    let carried_out = hints.iter().map(|hint| match hint.action {
                        Action::Prefetch { deadline } => prefetch(pool, tier, &hint.target, deadline - now),
                        _ => pool.hint(hint),
                    });
                    carried_out.map(told).collect()
                }
                Err(detail) => vec![Told::Malformed { outcome: "rejected", reason: "malformed", detail }],
            };
            told.into_iter().map(|outcome| ActionOutcome { action_id: action.action_id.clone(), outcome })
        });
        Ok(HintsAnswer { message_id: self.message_id.clone(), outcomes: outcomes.collect() })
    }
}

struct NoTier;

impl Prefetch for NoTier {
    fn prefetch(&self, _: PromptBlocks, _: Duration) -> Result<(), Rejection> {
        Err(Rejection::NoTier)
    }
}

fn prefetch(pool: &Pool, tier: &dyn Prefetch, target: &Target, within_ms: u64) -> Outcome {
    let unsupported = |why| Outcome::Rejected { reason: Rejection::Unsupported { why } };
    let wanted = match target {
        Target::Session(session) => pool.session_blocks(*session),
        Target::Hashes(hashes) => match pool.blocks_of_hashes(hashes) {
            Ok(blocks) => Some(blocks),
            Err(_) => {
                return unsupported("hashes of one group of layers are no prefix in others: name a session");
            }
        },
        _ => return unsupported("tokens of an open sequence are there: name a session, or hashes"),
    };
    let Some(wanted) = wanted else { return Outcome::Missing };
    let blocks = wanted.needed(usize::MAX).len();
    if blocks == 0 {
        return Outcome::Missing;
    }
    match tier.prefetch(wanted, Duration::from_millis(within_ms).min(PREFETCH)) {
        Ok(()) => Outcome::Deferred { blocks },
        Err(reason) => Outcome::Rejected { reason },
    }
}

fn told(outcome: Outcome) -> Told {
    let detail = match &outcome {
        Outcome::Rejected { reason: reason @ Rejection::Tenant { .. } } => {
            Some(format!("{reason}, the setting `tenant_hints` of a node"))
        }
        Outcome::Rejected { reason } => Some(reason.to_string()),
        _ => None,
    };
    Told::Outcome { outcome, detail }
}

fn is_understood(version: &str) -> bool {
    let major = version.split('.').next().unwrap_or_default();
    major == "0" || major == "1"
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Payload {
    #[serde(default, deserialize_with = "id")]
    session_id: Option<u64>,
    #[serde(default, deserialize_with = "id")]
    sequence_id: Option<u64>,
    start: Option<usize>,
    end: Option<usize>,
    directives: Option<Vec<Directive>>,
    block_hashes: Option<Vec<BlockHash>>,
    priority: Option<Importance>,
    #[serde(alias = "duration")]
    ttl_seconds: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Directive {
    #[serde(default)]
    start: usize,
    end: Option<usize>,
    priority: Importance,
    #[serde(alias = "ttl_seconds")]
    duration: Option<f64>,
}

/// From 0 to 100, or a name.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Importance {
    Number(i64),
    Named(Name),
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Name {
    Low,
    Normal,
    High,
}

/// Reads an id from a number, or decimal digits in a string: other languages lose digits of large
/// numbers.
fn id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Id {
        Number(u64),
        Text(String),
    }
    Ok(match Option::<Id>::deserialize(deserializer)? {
        None => None,
        Some(Id::Number(number)) => Some(number),
        Some(Id::Text(text)) => {
            let error =
                |_| serde::de::Error::custom(format_args!("{text:?} is no id: a number up to 2^64 - 1"));
            Some(text.parse().map_err(error)?)
        }
    })
}

impl HintAction {
    /// Returns the hints for which it stands, or what is wrong.
    fn hints(&self, now: Millis) -> Result<Vec<Hint>, String> {
        if !is_understood(&self.action_version) {
            return Err(format!("action_version {:?} is not understood; 0 and 1 are", self.action_version));
        }
        let payload = Payload::deserialize(&self.payload).map_err(|error| format!("payload: {error}"))?;
        let until = |seconds| until(seconds, now);
        let kind = self.action_type.as_str();
        let (has_priority, has_ttl) = (payload.priority.is_some(), payload.ttl_seconds.is_some());
        let is_timed = matches!(kind, "kv.retain" | "kv.pin" | "kv.prefetch");
        for (is_surplus, field) in [
            (has_priority && (kind != "kv.retain" || payload.directives.is_some()), "priority"),
            (has_ttl && (!is_timed || payload.directives.is_some()), "ttl_seconds"),
        ] {
            if is_surplus {
                return Err(format!("payload: {field} has no meaning for {kind}, or beside directives"));
            }
        }
        let action = match kind {
            "kv.retain" if payload.directives.is_some() => return payload.directives(now),
            "kv.retain" => retain(payload.priority, until(payload.ttl_seconds)?)?,
            "kv.pin" => Action::Pin { until: until(payload.ttl_seconds)? },
            "kv.demote" | "kv.evict" => Action::Demote,
            "kv.prefetch" => Action::Prefetch { deadline: until(payload.ttl_seconds)? },
            "kv.release" => Action::Release,
            other => {
                let other: String = other.chars().take(64).collect();
                return Err(format!(
                    "action_type {other:?} is not known; there are kv.retain, kv.pin, kv.demote, kv.evict, \
                     kv.prefetch and kv.release"
                ));
            }
        };
        if payload.directives.is_some() {
            return Err("payload: directives are for kv.retain".to_owned());
        }
        Ok(vec![Hint::new(payload.target()?, action)])
    }
}

impl Payload {
    fn target(self) -> Result<Target, String> {
        let has_range = self.start.is_some() || self.end.is_some();
        match (self.session_id, self.block_hashes, self.sequence_id) {
            (Some(session), None, None) if !has_range => Ok(Target::Session(SessionId(session))),
            (None, Some(hashes), None) if !has_range => Ok(Target::Hashes(hashes)),
            (None, None, Some(sequence)) => {
                let tokens = self.start.unwrap_or(0)..self.end.unwrap_or(usize::MAX);
                Ok(Target::Tokens(SequenceId(sequence), tokens))
            }
            _ => Err("payload: one of session_id, block_hashes and sequence_id (with start and end) names \
                      the blocks"
                .to_owned()),
        }
    }

    fn directives(self, now: Millis) -> Result<Vec<Hint>, String> {
        let (Some(sequence), None, None) = (self.sequence_id, self.session_id, self.block_hashes) else {
            return Err("payload: directives are for tokens of a sequence_id".to_owned());
        };
        if self.start.is_some() || self.end.is_some() {
            return Err("payload: start and end belong in each of the directives".to_owned());
        }
        let directives = self.directives.unwrap_or_default();
        if directives.is_empty() {
            return Err("payload: no directives".to_owned());
        }
        if directives.len() > DIRECTIVES_MAX {
            return Err(format!("payload: {} directives; at most {DIRECTIVES_MAX}", directives.len()));
        }
        directives
            .into_iter()
            .enumerate()
            .map(|(number, directive)| {
                let at = |error| format!("payload: directives[{number}]: {error}");
                let tokens = directive.start..directive.end.unwrap_or(usize::MAX);
                let until = until(directive.duration, now).map_err(at)?;
                let action = retain(Some(directive.priority), until).map_err(at)?;
                Ok(Hint::new(Target::Tokens(SequenceId(sequence), tokens), action))
            })
            .collect()
    }
}

fn until(seconds: Option<f64>, now: Millis) -> Result<Millis, String> {
    let Some(seconds) = seconds else { return Ok(Millis(u64::MAX)) };
    let time =
        Duration::try_from_secs_f64(seconds).map_err(|error| format!("ttl_seconds {seconds}: {error}"))?;
    Ok(now + time.as_millis().min(u64::MAX.into()) as u64)
}

fn retain(importance: Option<Importance>, until: Millis) -> Result<Action, String> {
    let priority = match importance {
        Some(Importance::Number(0)) => return Ok(Action::Demote),
        Some(Importance::Number(number @ (..0 | 101..))) => {
            return Err(format!("priority {number}: from 0 to 100"));
        }
        Some(Importance::Number(51..) | Importance::Named(Name::High)) => CachePriority::High,
        Some(Importance::Named(Name::Low)) => CachePriority::Low,
        Some(Importance::Number(_) | Importance::Named(Name::Normal)) | None => CachePriority::Normal,
    };
    Ok(Action::Retain { priority, until })
}

#[cfg(test)]
mod tests;
