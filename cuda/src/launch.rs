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

/// CTAs of a multiprocessor for operations with a waiting caller.
const WAITING_CTAS: u32 = 4;

/// What a device's pools do where there is more than one way. [`DEFAULT`](Self::DEFAULT) is for
/// use; measurements compare others with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choices {
    /// Whether waves beside batches are bulk copies, if the device has them.
    pub is_bulk_beside: bool,
    /// CTAs of a multiprocessor that convert rows.
    pub converting_ctas: u32,
    /// CTAs that copy between scratch memory and locked pages of the host; 0: the kernel is not
    /// used.
    pub host_ctas: u32,
    /// Whether copies from the device, copies to it and wipes have a stream each, or share one.
    pub are_streams_apart: bool,
    /// Bytes per wave of a compaction.
    pub wave_bytes: usize,
    /// Bytes of the host's memory per registration, if pages begin between two frames.
    pub registration_bytes: usize,
}

/// Declares the kernels, with the names of their functions.
macro_rules! kernels {
    ($($(#[$doc:meta])* $kernel:ident = $name:literal;)*) => {
        /// A kernel; see [`params`](super::params) for its parameters.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[expect(missing_docs, reason = "the names say it")]
        #[non_exhaustive]
        pub enum Kernel {
            $($(#[$doc])* $kernel,)*
        }

        impl Kernel {
            /// All kernels, in order.
            pub(super) const ALL: &[Self] = &[$(Self::$kernel),*];

            /// Returns the name of its function.
            #[must_use]
            pub const fn name(self) -> &'static CStr {
                match self {
                    $(Self::$kernel => $name,)*
                }
            }
        }
    };
}

kernels! {
    Copy = c"kvp_copy";
    /// By bulk copies, from compute capability 9.0 on; see
    /// [`Kernels::has_bulk`](super::Kernels::has_bulk).
    CopyBulk = c"kvp_copy_bulk";
    Zero = c"kvp_zero";
    Pack = c"kvp_pack";
    Rows = c"kvp_rows";
    Quantise = c"kvp_quantise";
    Dequantise = c"kvp_dequantise";
    Patch = c"kvp_patch";
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
    Service,
    Mapping,
    Down,
    Up,
    Wipes,
    Sending,
    Moving,
    /// The stream that the caller names.
    Engine,
}

impl StreamRole {
    /// The streams that a storage creates, in order.
    pub(super) const OWN: [Self; 7] =
        [Self::Service, Self::Mapping, Self::Down, Self::Up, Self::Wipes, Self::Sending, Self::Moving];

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
    /// Frames packed.
    Pack,
    /// Frames packed for another device.
    Send,
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

impl Choices {
    /// The choices of [`Device::open`](super::Device::open).
    ///
    /// Few CTAs copy to pages of the host: with pieces of 16 KiB they have as many bytes in flight
    /// as the bus needs, and leave most places to a model's CTAs. Each wave costs a round trip to
    /// the host, during which the device copies the next one.
    pub const DEFAULT: Self = Self {
        is_bulk_beside: false,
        converting_ctas: WAITING_CTAS,
        host_ctas: 16,
        are_streams_apart: true,
        wave_bytes: 64 << 20,
        registration_bytes: 256 << 20,
    };

    /// Returns how the kernel of some work is launched. `bulk`: whether the device has bulk copies
    /// and the pieces allow them.
    ///
    /// Alone, copies occupy all multiprocessors, each with one ring of 64 KiB: on an H200 two and
    /// three rings copied no faster. Beside batches, few CTAs leave most multiprocessors to the
    /// model, and they use no shared memory: a ring does not fit beside a CTA of the model that
    /// holds most of it, so that the wave would wait for the whole step.
    #[must_use]
    pub const fn rule(&self, work: Work, bulk: bool) -> Rule {
        use Most::{Ctas, PerMultiprocessor};
        use StreamRole::{Down, Engine, Moving, Sending, Service};
        const fn of(kernel: Kernel, jobs: u32, most: Most, stream: StreamRole) -> Rule {
            Rule { kernel, threads: THREADS, shared_bytes: 0, jobs, most, stream }
        }
        const WARPS: u32 = THREADS / 32;
        const WAITING: Most = PerMultiprocessor(WAITING_CTAS);
        const fn copy(bulk: bool, teams: u32, most: Most, stream: StreamRole) -> Rule {
            if bulk {
                let rule = of(Kernel::CopyBulk, 1, most, stream);
                return Rule { threads: BULK_THREADS, shared_bytes: BULK_SHARED_BYTES, ..rule };
            }
            Rule { threads: teams * COPY_TEAM, ..of(Kernel::Copy, teams, most, stream) }
        }
        let (converting, pages) = (PerMultiprocessor(self.converting_ctas), Ctas(self.host_ctas));
        let [up, wipes] =
            if self.are_streams_apart { [StreamRole::Up, StreamRole::Wipes] } else { [Down; 2] };
        match work {
            Work::Copy => copy(bulk, 8, PerMultiprocessor(1), Service),
            Work::Wave => copy(bulk, 8, PerMultiprocessor(1), Moving),
            Work::WaveBeside { ctas } => copy(bulk && self.is_bulk_beside, 2, Ctas(ctas), Moving),
            Work::Zero => of(Kernel::Zero, 1, WAITING, wipes),
            Work::Pack => of(Kernel::Pack, 1, WAITING, Down),
            Work::Send => of(Kernel::Pack, 1, WAITING, Sending),
            Work::Unpack => of(Kernel::Pack, 1, WAITING, up),
            Work::ToPages => of(Kernel::Pack, 1, pages, Down),
            Work::FromPages => of(Kernel::Pack, 1, pages, up),
            Work::Rows => of(Kernel::Rows, WARPS, WAITING, Service),
            Work::Quantise => of(Kernel::Quantise, WARPS, converting, Service),
            Work::Dequantise => of(Kernel::Dequantise, WARPS, converting, Service),
            // There are few entries.
            Work::Patch => of(Kernel::Patch, THREADS, Ctas(64), Engine),
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

/// Implements [`Params`]: the number of jobs as a product, and when bulk copies are possible.
macro_rules! params {
    ($($params:ty: |$of:ident| $first:expr, $second:expr $(, bulk if $bulk:expr)?;)*) => {$(
        impl Params for $params {
            fn jobs(&self) -> usize {
                let $of = self;
                ($first as usize).saturating_mul($second as usize)
            }

            $(fn allows_bulk(&self) -> bool {
                let $of = self;
                $bulk
            })?
        }
    )*};
}

params! {
    CopyParams: |of| of.n_pieces, of.n_moves, bulk if of.unit == 16;
    ZeroParams: |of| of.n_pieces, of.n_frames;
    PackParams: |of| of.n_pieces, of.n_frames;
    RowsParams: |of| if of.v == 0 { 1 } else { 2 }, of.n_tokens;
    QuantParams: |of| of.rows.jobs(), of.heads;
    PatchParams: |of| of.n, 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_is_as_large_as_its_jobs_need_and_at_most_the_rules() {
        let rule = |work, bulk| Choices::DEFAULT.rule(work, bulk);
        let wave = rule(Work::Wave, false);
        assert_eq!((wave.shape(0, 132).ctas, wave.shape(9, 132).ctas), (1, 2));
        assert_eq!(wave.shape(usize::MAX, 132).ctas, 132);
        assert_eq!(rule(Work::Pack, true).shape(1 << 20, 132).ctas, 4 * 132);
        assert_eq!(rule(Work::Patch, true).shape(257, 132).ctas, 2);
    }

    #[test]
    fn a_wave_beside_batches_takes_no_shared_memory() {
        for bulk in [false, true] {
            let rule = Choices::DEFAULT.rule(Work::WaveBeside { ctas: MOVING_CTAS }, bulk);
            assert_eq!((rule.kernel, rule.shared_bytes), (Kernel::Copy, 0));
            assert_eq!(rule.shape(1 << 20, 132), Shape { ctas: 32, threads: 256, shared_bytes: 0 });
        }
        let alone = Choices::DEFAULT.rule(Work::Wave, true);
        assert_eq!((alone.kernel, alone.shared_bytes), (Kernel::CopyBulk, BULK_SHARED_BYTES));
        assert_eq!(
            alone.to_string(),
            "kvp_copy_bulk, at most 1 CTA a multiprocessor of 32 threads and 64 KiB of shared memory, \
             stream Moving"
        );
    }
}
