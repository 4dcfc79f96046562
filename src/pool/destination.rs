//! Destinations of migrations: pools of this process, and other nodes.

use crate::migrate::MigrationReport;
use crate::sequence::Sequence;

use super::Pool;

/// Destination within this process.
///
/// [`Target::node`] names one on another node.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Target<'a> {
    /// Another pool of this process, on any device or on the host.
    Device(&'a Pool),
}

/// Destination on another node, by its name.
///
/// The node must be known to the pool: see [`Pool::set_remotes`].
#[derive(Clone, Copy, Debug)]
pub struct NodeTarget<'a>(&'a str);

impl Target<'_> {
    /// Returns the destination on another node.
    pub fn node(name: &str) -> NodeTarget<'_> {
        NodeTarget(name)
    }
}

impl<'a> From<&'a Pool> for Target<'a> {
    fn from(pool: &'a Pool) -> Self {
        Self::Device(pool)
    }
}

/// Where a destination is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Place<'a> {
    /// In this process.
    Pool(&'a Pool),
    /// On the node of this name.
    Node(&'a str),
}

/// A pool that sequences and cached blocks can move to.
///
/// Implemented by `&Pool`, [`Target`] and [`NodeTarget`]. What a migration returns depends on it:
/// in this process the sequence continues as a [`Sequence`] of the other pool; on another node it
/// continues there, and only the report comes back.
pub trait Destination: Copy + Send + sealed::Sealed {
    /// What is returned of a sequence that arrived: `(Sequence, MigrationReport)` in this process,
    /// the [`MigrationReport`] on another node.
    type Arrived: Send;

    #[doc(hidden)]
    fn place(&self) -> Place<'_>;

    #[doc(hidden)]
    fn arrived(sequence: Option<Sequence>, report: MigrationReport) -> Self::Arrived;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for &super::Pool {}
    impl Sealed for super::Target<'_> {}
    impl Sealed for super::NodeTarget<'_> {}
}

impl Destination for &Pool {
    type Arrived = (Sequence, MigrationReport);

    fn place(&self) -> Place<'_> {
        Place::Pool(self)
    }

    fn arrived(sequence: Option<Sequence>, report: MigrationReport) -> Self::Arrived {
        let sequence = sequence.unwrap_or_else(|| unreachable!("a pool of this process has it"));
        (sequence, report)
    }
}

impl Destination for Target<'_> {
    type Arrived = (Sequence, MigrationReport);

    fn place(&self) -> Place<'_> {
        let Self::Device(pool) = self;
        Place::Pool(pool)
    }

    fn arrived(sequence: Option<Sequence>, report: MigrationReport) -> Self::Arrived {
        <&Pool>::arrived(sequence, report)
    }
}

impl Destination for NodeTarget<'_> {
    type Arrived = MigrationReport;

    fn place(&self) -> Place<'_> {
        Place::Node(self.0)
    }

    fn arrived(_sequence: Option<Sequence>, report: MigrationReport) -> Self::Arrived {
        report
    }
}
