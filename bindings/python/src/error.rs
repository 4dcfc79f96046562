//! Errors of the library as exceptions of `kvpool.errors`: the message is that of the Rust error,
//! and its fields are attributes.

use std::fmt::{Debug, Display};

use kvpool::compact::Blocker;
use kvpool::{
    AllocError, AuditError, BuildError, DefragError, FrameError, FrameShrinkError, GrowError, HandleError,
    Invalid, PrefixError, ResizeError, SequenceError, SequenceId, SettleError, ShrinkError, StepError,
    StorageError, TenantError, TransferError,
};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// Result of a call from Python.
pub type Outcome<T> = Result<T, Failure>;

/// An exception. The library's errors become one by `?`.
#[derive(Debug)]
pub struct Failure(PyErr);

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

impl Failure {
    /// Adds a field to the exception.
    pub fn with(self, name: &'static str, value: impl for<'py> IntoPyObjectExt<'py>) -> Self {
        Python::attach(|py| {
            // An exception without a dictionary goes without the field.
            let _ = self.0.value(py).setattr(name, field(value));
        });
        self
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

/// Attributes of an exception, by name.
pub type Fields = Vec<(&'static str, Py<PyAny>)>;

/// A value of a field.
pub fn field(value: impl for<'py> IntoPyObjectExt<'py>) -> Py<PyAny> {
    Python::attach(|py| value.into_py_any(py).unwrap_or_else(|_| py.None()))
}

/// Writes `fields![name: value, ...]`.
macro_rules! fields {
    ($($name:ident: $value:expr),* $(,)?) => {
        vec![$((stringify!($name), $crate::error::field($value))),*]
    };
}
pub(crate) use fields;

/// Makes an exception of a class of `kvpool.errors`. Its `kind` is the class's name unless a field
/// of that name is given.
pub fn raise(class: &'static str, message: impl Display, fields: Fields) -> Failure {
    Python::attach(|py| {
        let made = || -> PyResult<PyErr> {
            static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
            let module = MODULE
                .get_or_try_init(py, || PyResult::Ok(py.import("kvpool.errors")?.into_any().unbind()))?;
            let class = module.bind(py).getattr(class)?;
            let named = PyDict::new(py);
            for (name, value) in fields {
                named.set_item(name, value)?;
            }
            let error = class.cast::<PyType>()?.call((message.to_string(),), Some(&named))?;
            Ok(PyErr::from_value(error))
        };
        Failure(made().unwrap_or_else(|error| error))
    })
}

/// Refuses an argument.
pub fn invalid(message: impl Display) -> Failure {
    raise("InvalidArgument", message, Vec::new())
}

/// The name of an enum's variant, which derived `Debug` writes first.
pub fn kind(error: &impl Debug) -> String {
    let text = format!("{error:?}");
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

/// Fields of an argument that was refused.
fn fields_of(error: &Invalid) -> Fields {
    fields![kind: "Invalid", what: error.what, index: error.index, got: &*error.got, limit: &*error.limit]
}

/// Fields of an argument that was refused for a sequence.
fn fields_of_sequence(id: SequenceId, error: &Invalid) -> Fields {
    let mut fields = fields_of(error);
    fields.push(("sequence", field(id.0)));
    fields
}

/// An exception for an error without fields that users act on.
fn plain(class: &'static str, error: &(impl Display + Debug)) -> Failure {
    raise(class, error, fields![kind: kind(error)])
}

impl From<AllocError> for Failure {
    fn from(error: AllocError) -> Self {
        use AllocError as E;
        let (class, mut fields) = match error {
            E::Zero => ("InvalidArgument", fields![asked: 0]),
            E::TooLarge { asked, total } => ("OutOfBlocks", fields![asked: asked, total: total]),
            E::Exhausted { asked, free, retired, evictable, held, in_transfer, oldest_batch } => (
                "OutOfBlocks",
                fields![asked: asked, free: free, retired: retired, evictable: evictable, held: held,
                    in_transfer: in_transfer, oldest_batch: oldest_batch.map(|ticket| ticket.0)],
            ),
            E::OverQuota { asked, tenant, quota, held } => {
                ("OverQuota", fields![asked: asked, tenant: tenant.0, quota: quota, held: held])
            }
            E::Floors { asked, most } => ("OutOfBlocks", fields![asked: asked, most: most]),
            E::NoRun { asked, longest_run, free, evictable } => {
                ("NoRun", fields![asked: asked, longest_run: longest_run, free: free, evictable: evictable])
            }
            E::Reserved { asked, total, reserve } => {
                ("OutOfBlocks", fields![asked: asked, total: total, reserve: reserve])
            }
            E::Deadline { asked, free, retired, oldest_batch, head, turn } => (
                "Timeout",
                fields![asked: asked, free: free, retired: retired,
                    oldest_batch: oldest_batch.map(|oldest| oldest.ticket.0),
                    oldest_batch_seconds: oldest_batch.map(|oldest| oldest.age().as_secs_f64()),
                    head_asked: head.map(|head| head.asked),
                    head_priority: head.map(|head| head.priority.to_string()),
                    turn: turn.map(|turn| turn.to_string())],
            ),
            E::Behind { asked, priority, waiting, lacking } => (
                "OutOfBlocks",
                fields![asked: asked, priority: priority.to_string(), waiting: waiting.to_string(),
                    lacking: lacking],
            ),
            E::FenceRefused { asked, free } => ("OutOfBlocks", fields![asked: asked, free: free]),
            E::DeviceLost { device } => ("PoolLost", fields![device: device.to_string()]),
            E::WrongDevice { asked, device } => {
                ("InvalidArgument", fields![asked: asked.to_string(), device: device.to_string()])
            }
            _ => ("OutOfBlocks", Vec::new()),
        };
        fields.push(("kind", field(kind(&error))));
        raise(class, error, fields)
    }
}

impl From<HandleError> for Failure {
    fn from(error: HandleError) -> Self {
        use HandleError as E;
        let (class, mut fields) = match error {
            E::Foreign { handle, pool } => {
                ("ForeignHandle", fields![block: handle.id.0, pool: pool.to_string()])
            }
            E::Stale { handle, now } => {
                ("StaleHandle", fields![block: handle.id.0, generation: handle.generation.0, now: now.0])
            }
            E::OutOfRange { handle, total } => ("HandleError", fields![block: handle.id.0, total: total]),
            E::TooManyReferences { id, max } | E::TooManyPins { id, max } => {
                ("HandleError", fields![block: id.0, max: max])
            }
            _ => ("HandleError", Vec::new()),
        };
        fields.push(("kind", field(kind(&error))));
        raise(class, error, fields)
    }
}

impl From<FrameError> for Failure {
    fn from(error: FrameError) -> Self {
        use FrameError as E;
        let mut fields = match error {
            E::OutOfRange { index, frame, frames } => {
                fields![index: index, frame: frame.0, frames: frames]
            }
            E::Null { index, frame }
            | E::Free { index, frame }
            | E::Unreferenced { index, frame }
            | E::Unavailable { index, frame }
            | E::Cached { index, frame } => fields![index: index, frame: frame.0],
            E::Repeated { index, frame, listed, references } => {
                fields![index: index, frame: frame.0, listed: listed, references: references]
            }
            E::TooManyReferences { index, frame, max } => {
                fields![index: index, frame: frame.0, max: max]
            }
            E::InUse { index, frame, references } => {
                fields![index: index, frame: frame.0, references: references]
            }
            E::EmptyHash { index } => fields![index: index],
            E::ForeignKey { index, .. } => fields![index: index],
            E::NotIdle { frames } => fields![frames: frames],
            _ => Vec::new(),
        };
        let class = if matches!(error, E::ForeignKey { .. }) { "ForeignHandle" } else { "FrameRefused" };
        fields.push(("kind", field(kind(&error))));
        raise(class, error, fields)
    }
}

impl From<SequenceError> for Failure {
    fn from(error: SequenceError) -> Self {
        use SequenceError as E;
        let mut fields = match &error {
            E::Alloc(error) => return (*error).into(),
            E::Handle(error) => return (*error).into(),
            E::Storage(error) => return error.clone().into(),
            E::Prefix(error) => return error.clone().into(),
            E::Tenant(error) => return (*error).into(),
            E::NoStorage => return plain("StorageError", &error),
            E::TokensUnknown { id, known } => fields![sequence: id.0, known: *known],
            E::TokensAhead { id, length, announced } => {
                fields![sequence: id.0, length: *length, announced: *announced]
            }
            E::AlreadyOpen { id } | E::NotOpen { id } | E::ForeignSequence { id } => fields![sequence: id.0],
            E::Invalid { id, error: invalid } => {
                return raise("InvalidSequenceArgument", &error, fields_of_sequence(*id, invalid));
            }
            E::NotWritable { id, position, block } => {
                fields![sequence: id.0, position: *position, block: block.0]
            }
            E::NotReadable { id, index, block } => fields![sequence: id.0, index: *index, block: block.0],
            E::BehindWindow { id, position, kept_from } => {
                fields![sequence: id.0, position: *position, kept_from: *kept_from]
            }
            E::StateAhead { id, asked, tokens } => fields![sequence: id.0, asked: *asked, tokens: *tokens],
            _ => Vec::new(),
        };
        let class = match &error {
            E::ForeignSequence { .. } => "ForeignHandle",
            _ => "SequenceError",
        };
        fields.push(("kind", field(kind(&error))));
        raise(class, error, fields)
    }
}

impl From<TenantError> for Failure {
    fn from(error: TenantError) -> Self {
        use TenantError as E;
        let tenant = match error {
            E::Disabled { tenant }
            | E::Unknown { tenant }
            | E::TooMany { tenant, .. }
            | E::QuotaBelowFloor { tenant, .. }
            | E::Floors { tenant, .. } => Some(tenant.0),
            _ => None,
        };
        raise("InvalidArgument", error, fields![kind: kind(&error), tenant: tenant])
    }
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Self {
        match &error {
            StepError::Lacking { sequences, .. } => {
                let lacking: Vec<u64> = sequences.iter().map(|id| id.0).collect();
                raise("OutOfBlocks", &error, fields![kind: "Lacking", sequences: lacking])
            }
            StepError::Sequence { id, error: SequenceError::Invalid { error: invalid, .. } } => {
                raise("InvalidSequenceArgument", &error, fields_of_sequence(*id, invalid))
            }
            StepError::Sequence { id, error: reason } => {
                let is_lost = matches!(reason, SequenceError::Alloc(AllocError::DeviceLost { .. }));
                let class = if is_lost { "PoolLost" } else { "SequenceError" };
                raise(class, &error, fields![kind: kind(reason), sequence: id.0])
            }
            _ => plain("SequenceError", &error),
        }
    }
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        match &error {
            StorageError::Invalid(invalid) => raise("InvalidStorageArgument", invalid, fields_of(invalid)),
            _ => plain(if error.is_lost() { "PoolLost" } else { "StorageError" }, &error),
        }
    }
}

impl From<PrefixError> for Failure {
    fn from(error: PrefixError) -> Self {
        match &error {
            PrefixError::Invalid(invalid) => raise("InvalidCacheArgument", invalid, fields_of(invalid)),
            _ => plain("CacheError", &error),
        }
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Self {
        match &error {
            BuildError::Invalid(invalid)
            | BuildError::Prefix(PrefixError::Invalid(invalid))
            | BuildError::Storage(StorageError::Invalid(invalid)) => {
                raise("BuildError", invalid, fields_of(invalid))
            }
            error => plain("BuildError", error),
        }
    }
}

impl From<SettleError> for Failure {
    fn from(error: SettleError) -> Self {
        match error {
            SettleError::Deadline { batch } => {
                raise("Timeout", error, fields![kind: "Deadline", batch: batch.0])
            }
            SettleError::ForeignSequence { .. } => plain("ForeignHandle", &error),
            _ => plain("InvalidArgument", &error),
        }
    }
}

impl From<TransferError> for Failure {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::Alloc(error) => error.into(),
            TransferError::Sequence(error) => error.into(),
            TransferError::Storage(error) => error.into(),
            TransferError::Invalid(error) => raise("InvalidMigrateArgument", &error, fields_of(&error)),
            TransferError::ForeignSequence { .. } => plain("ForeignHandle", &error),
            TransferError::BeingWritten { batch, .. } => {
                raise("Timeout", &error, fields![kind: "BeingWritten", batch: batch.0])
            }
            error => plain("MigrateError", &error),
        }
    }
}

impl From<GrowError> for Failure {
    fn from(error: GrowError) -> Self {
        plain("ResizeError", &error)
    }
}

impl From<ShrinkError> for Failure {
    fn from(error: ShrinkError) -> Self {
        plain("ResizeError", &error)
    }
}

impl From<FrameShrinkError> for Failure {
    fn from(error: FrameShrinkError) -> Self {
        let fields = match &error {
            FrameShrinkError::Shrink(error) => return (*error).into(),
            FrameShrinkError::InUse { frames } => {
                fields![kind: "InUse", frames: frames.iter().map(|frame| frame.0).collect::<Vec<_>>()]
            }
            FrameShrinkError::NotFree { frames } => fields![kind: "NotFree", frames: *frames],
            _ => Vec::new(),
        };
        raise("ResizeError", error, fields)
    }
}

impl From<ResizeError> for Failure {
    fn from(error: ResizeError) -> Self {
        let fields = match &error {
            ResizeError::Grow(error) => return (*error).into(),
            ResizeError::Shrink(error) => return (*error).into(),
            ResizeError::Defrag(error) => return error.clone().into(),
            ResizeError::NoRoom { asked, used } => fields![kind: "NoRoom", asked: *asked, used: *used],
            ResizeError::NoTurn { asked, holder } => fields![kind: "NoTurn", asked: *asked,
                holder: holder.map(|holder| holder.to_string())],
            ResizeError::Blocked { asked, blocks, retired } => {
                let named = |(id, why): &(kvpool::BlockId, Blocker)| (id.0, why.to_string());
                fields![kind: "Blocked", asked: *asked, retired: *retired,
                    blocks: blocks.iter().map(named).collect::<Vec<_>>()]
            }
            _ => Vec::new(),
        };
        raise("ResizeError", error, fields)
    }
}

/// Errors whose message says everything.
macro_rules! plainly {
    ($($error:ty => $class:literal),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                plain($class, &error)
            }
        })*
    };
}

plainly! {
    AuditError => "AuditError",
    DefragError => "DefragmentError",
    kvpool_node::NodeError => "NodeError",
    kvpool_node::transport::tcp::LinkError => "NodeError",
}
