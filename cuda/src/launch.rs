//! Decides every launch: kernel, grid, block, shared memory and stream.
//!
//! The pool launches by these rules, and so does `gpu_check`, so that it measures the launches that
//! pools make. Jobs are the kernel's units of work; see [`params`](super::params).

use std::ffi::CStr;
use std::fmt;

use cudarc::driver::DeviceRepr;

use super::params::{
    BULK_SHARED_BYTES, BULK_THREADS, COPY_TEAM, CopyParams, PackParams, PatchParams, QuantParams, RowsParams,
    THREADS, Way, ZeroParams,
};
use super::stream::StreamPriority;

/// Default number of CTAs that copy beside batches: of the 132 multiprocessors of an H200, a
/// hundred are left to the model.
pub const MOVING_CTAS: u32 = 32;

/// Number of CTAs that copy between scratch memory and locked pages of the host: with pieces of 16
/// KiB as many bytes in flight as the bus needs, and few places that a model's CTAs cannot have
/// meanwhile.
pub const HOST_CTAS: u32 = 16;

/// A kernel; see [`params`](super::params) for its parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names say it")]
#[non_exhaustive]
pub enum Kernel {
    Copy,
    /// By bulk copies, from compute capability 9.0 on; see
    /// [`Device::has_bulk`](super::Device::has_bulk).
    CopyBulk,
    Zero,
    Pack,
    Rows,
    Quantise,
    Dequantise,
    Patch,
}

impl Kernel {
    /// All kernels.
    pub(super) const ALL: [Self; 8] = [
        Self::Copy,
        Self::CopyBulk,
        Self::Zero,
        Self::Pack,
        Self::Rows,
        Self::Quantise,
        Self::Dequantise,
        Self::Patch,
    ];

    /// Returns the name of its function.
    #[must_use]
    pub const fn name(self) -> &'static CStr {
        match self {
            Self::Copy => c"kvp_copy",
            Self::CopyBulk => c"kvp_copy_bulk",
            Self::Zero => c"kvp_zero",
            Self::Pack => c"kvp_pack",
            Self::Rows => c"kvp_rows",
            Self::Quantise => c"kvp_quantise",
            Self::Dequantise => c"kvp_dequantise",
            Self::Patch => c"kvp_patch",
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name().to_string_lossy())
    }
}

/// A stream of a storage; see its table in `storage.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names say it")]
#[non_exhaustive]
pub enum StreamRole {
    /// The stream that the caller names.
    Engine,
    Service,
    Mapping,
    Down,
    Up,
    Wipes,
    Sending,
    Moving,
}

impl StreamRole {
    /// Returns the priority with which it is created.
    #[must_use]
    pub const fn priority(self) -> StreamPriority {
        if matches!(self, Self::Moving) { StreamPriority::Lowest } else { StreamPriority::Usual }
    }
}

/// Work of a pool for which a kernel is launched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Work {
    /// A copy of frames with a waiting caller, or on write, then on the engine's stream.
    Copy,
    /// A wave of a compaction while no batch is in flight.
    Wave,
    /// A wave beside batches.
    WaveBeside {
        /// Maximum number of its CTAs.
        ctas: u32,
    },
    /// Frames wiped.
    Zero,
    /// Frames packed; for another device, on the stream of sending.
    Pack,
    /// Frames unpacked.
    Unpack,
    /// Packed frames written to locked pages of the host.
    ToPages,
    /// Packed frames read from locked pages of the host.
    FromPages,
    /// Rows stored or loaded unconverted; or on the engine's stream, as conversions.
    Rows,
    /// Rows stored as codes.
    Quantise,
    /// Codes loaded as rows.
    Dequantise,
    /// Entries of a block table updated.
    Patch,
}

/// The largest grid of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Most {
    PerMultiprocessor(u32),
    Ctas(u32),
}

/// How a kernel is launched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// The kernel.
    pub kernel: Kernel,
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA.
    pub shared_bytes: u32,
    /// Jobs that a CTA does at a time.
    pub jobs: u32,
    /// The largest grid; fewer CTAs for fewer jobs.
    pub most: Most,
    /// The stream.
    pub stream: StreamRole,
}

/// Size of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of CTAs.
    pub ctas: u32,
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA.
    pub shared_bytes: u32,
}

impl Work {
    /// Returns how its kernel is launched. `bulk`: whether the device has bulk copies and the
    /// pieces allow them.
    ///
    /// Alone, copies occupy all multiprocessors, each with one ring of 64 KiB: on an H200 two and
    /// three rings copied no faster. Beside batches, few CTAs leave most multiprocessors to the
    /// model, and they use no shared memory: a ring does not fit beside a CTA of the model that
    /// holds most of it, so that the wave would wait for the whole step.
    #[must_use]
    pub const fn rule(self, bulk: bool) -> Rule {
        use Most::{Ctas, PerMultiprocessor};
        use StreamRole::{Down, Engine, Moving, Service, Up, Wipes};
        const fn of(kernel: Kernel, jobs: u32, most: Most, stream: StreamRole) -> Rule {
            Rule { kernel, threads: THREADS, shared_bytes: 0, jobs, most, stream }
        }
        const WARPS: u32 = THREADS / 32;
        // Operations with a waiting caller.
        const WAITING: Most = PerMultiprocessor(4);
        match self {
            Self::Copy | Self::Wave => {
                let stream = if matches!(self, Self::Copy) { Service } else { Moving };
                if bulk {
                    let rule = of(Kernel::CopyBulk, 1, PerMultiprocessor(1), stream);
                    return Rule { threads: BULK_THREADS, shared_bytes: BULK_SHARED_BYTES, ..rule };
                }
                Rule { threads: 8 * COPY_TEAM, ..of(Kernel::Copy, 8, PerMultiprocessor(1), stream) }
            }
            Self::WaveBeside { ctas } => {
                Rule { threads: 2 * COPY_TEAM, ..of(Kernel::Copy, 2, Ctas(ctas), Moving) }
            }
            Self::Zero => of(Kernel::Zero, 1, WAITING, Wipes),
            Self::Pack => of(Kernel::Pack, 1, WAITING, Down),
            Self::Unpack => of(Kernel::Pack, 1, WAITING, Up),
            Self::ToPages => of(Kernel::Pack, 1, Ctas(HOST_CTAS), Down),
            Self::FromPages => of(Kernel::Pack, 1, Ctas(HOST_CTAS), Up),
            Self::Rows => of(Kernel::Rows, WARPS, WAITING, Service),
            Self::Quantise => of(Kernel::Quantise, WARPS, WAITING, Service),
            Self::Dequantise => of(Kernel::Dequantise, WARPS, WAITING, Service),
            // There are few entries.
            Self::Patch => of(Kernel::Patch, THREADS, Ctas(64), Engine),
        }
    }
}

impl Way {
    /// Returns the work of frames that are packed or unpacked.
    #[must_use]
    pub const fn work(self) -> Work {
        if matches!(self, Self::Out) { Work::Pack } else { Work::Unpack }
    }

    /// Returns the work of packed frames that a kernel copies to locked pages of the host, or from
    /// there.
    #[must_use]
    pub const fn work_on_pages(self) -> Work {
        if matches!(self, Self::Out) { Work::ToPages } else { Work::FromPages }
    }

    /// Returns the other direction.
    #[must_use]
    pub const fn reversed(self) -> Self {
        if matches!(self, Self::Out) { Self::In } else { Self::Out }
    }
}

impl Rule {
    /// Returns the launch for a number of jobs on a device with this many multiprocessors.
    #[must_use]
    pub fn shape(&self, jobs: usize, multiprocessors: u32) -> Shape {
        let most = match self.most {
            Most::PerMultiprocessor(ctas) => ctas * multiprocessors.max(1),
            Most::Ctas(ctas) => ctas,
        };
        let ctas = jobs.div_ceil(self.jobs as usize).min(most as usize).max(1) as u32;
        Shape { ctas, threads: self.threads, shared_bytes: self.shared_bytes }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, threads, shared_bytes, most, stream, .. } = self;
        write!(f, "{kernel}, ")?;
        match most {
            Most::PerMultiprocessor(1) => write!(f, "at most 1 CTA a multiprocessor")?,
            Most::PerMultiprocessor(ctas) => write!(f, "at most {ctas} CTAs a multiprocessor")?,
            Most::Ctas(ctas) => write!(f, "at most {ctas} CTAs")?,
        }
        write!(f, " of {threads} threads")?;
        if *shared_bytes > 0 {
            write!(f, " and {} KiB of shared memory", shared_bytes / 1024)?;
        }
        write!(f, ", stream {stream:?}")
    }
}

/// Parameters of a kernel, which determine the number of its jobs.
pub trait Params: DeviceRepr {
    /// Returns the number of jobs.
    fn jobs(&self) -> usize;

    /// Returns true if the kernel for bulk copies can access the bytes.
    fn allows_bulk(&self) -> bool {
        false
    }
}

/// Implements [`Params`]: the number of jobs as a product.
macro_rules! params {
    ($($params:ty: |$of:ident| $first:expr, $second:expr;)*) => {$(
        impl Params for $params {
            fn jobs(&self) -> usize {
                let $of = self;
                ($first as usize).saturating_mul($second as usize)
            }
        }
    )*};
}

params! {
    ZeroParams: |of| of.n_pieces, of.n_frames;
    PackParams: |of| of.n_pieces, of.n_frames;
    RowsParams: |of| if of.v == 0 { 1 } else { 2 }, of.n_tokens;
    QuantParams: |of| of.rows.jobs(), of.heads;
    PatchParams: |of| of.n, 1;
}

impl Params for CopyParams {
    fn jobs(&self) -> usize {
        (self.n_pieces as usize).saturating_mul(self.n_moves as usize)
    }

    fn allows_bulk(&self) -> bool {
        self.unit == 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_is_as_large_as_its_jobs_need_and_at_most_the_rules() {
        let wave = Work::Wave.rule(false);
        assert_eq!((wave.shape(0, 132).ctas, wave.shape(9, 132).ctas), (1, 2));
        assert_eq!(wave.shape(usize::MAX, 132).ctas, 132);
        assert_eq!(Work::Pack.rule(true).shape(1 << 20, 132).ctas, 4 * 132);
        assert_eq!(Work::Patch.rule(true).shape(257, 132).ctas, 2);
    }

    #[test]
    fn a_wave_beside_batches_takes_no_shared_memory() {
        for bulk in [false, true] {
            let rule = Work::WaveBeside { ctas: MOVING_CTAS }.rule(bulk);
            assert_eq!((rule.kernel, rule.shared_bytes), (Kernel::Copy, 0));
            assert_eq!(rule.shape(1 << 20, 132), Shape { ctas: 32, threads: 256, shared_bytes: 0 });
        }
        let alone = Work::Wave.rule(true);
        assert_eq!((alone.kernel, alone.shared_bytes), (Kernel::CopyBulk, BULK_SHARED_BYTES));
        assert_eq!(
            alone.to_string(),
            "kvp_copy_bulk, at most 1 CTA a multiprocessor of 32 threads and 64 KiB of shared memory, \
             stream Moving"
        );
    }
}
