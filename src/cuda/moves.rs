//! Copies and zeroing of whole frames.

use cudarc::driver::sys::{self, CUstream};

use crate::error::StorageError;
use crate::ids::Run;
use crate::storage::{CopyDone, DeviceStream, FrameMove, Storage, check};

use super::command_scope::CommandScope;
use super::device::raw;
use super::kernels::Kernel;
use super::memory::bytes_of;
use super::params::{CopyParams, Move, ZeroParams};
use super::staging::BYTES_MAX;
use super::storage::CudaStorage;

impl CudaStorage {
    /// Implements [`Storage::copy`].
    ///
    /// # Safety
    /// The frame rule.
    pub(super) unsafe fn copy_here(&self, moves: &[FrameMove]) -> Result<(), StorageError> {
        check::moves(moves, self.frames())?;
        let grid = self.grid(moves.len().saturating_mul(self.inner.pieces.list.len()));
        // SAFETY: the frames exist; destinations are distinct and no destination is a source; the
        // rest is the caller's promise.
        unsafe { self.enqueue_copy(moves, self.service.raw(), grid)?.wait() }
    }

    /// Implements [`Storage::copy_then`].
    ///
    /// # Safety
    /// The frame rule, until `done` is called or dropped.
    pub(super) unsafe fn copy_behind(&self, moves: &[FrameMove], done: CopyDone) {
        if let Err(error) = check::moves(moves, self.frames()) {
            return done(Err(error));
        }
        // SAFETY: as above. The commands keep the memory and the kernels alive.
        match unsafe { self.enqueue_copy(moves, self.moving.raw(), self.moving_ctas) } {
            Ok(commands) => commands.then(self.inner.clone(), done),
            // The command scope has waited for the commands that it had enqueued.
            Err(error) => done(Err(error)),
        }
    }

    /// Implements [`Storage::copy_on`].
    ///
    /// # Safety
    /// The frame rule, until the stream has executed the copy.
    pub(super) unsafe fn copy_in_order(
        &self,
        stream: &DeviceStream,
        moves: &[FrameMove],
    ) -> Result<(), StorageError> {
        self.inner.device.check_stream(stream, "copying frames")?;
        check::moves(moves, self.frames())?;
        let grid = self.grid(moves.len().saturating_mul(self.inner.pieces.list.len()));
        let on = raw(stream);
        // SAFETY: as above; the stream is of this device.
        let mut commands = unsafe { self.enqueue_copy(moves, on, grid)? };
        // Under another batch, the host may store to the copy before this stream has executed
        // it.
        let context = &self.inner.device.0.context;
        // SAFETY: the stream lives as long as the storage, and is of this context.
        unsafe { commands.mark()?.hold_back(context, self.service.raw())? };
        commands.then((self.inner.clone(), stream.clone()), Box::new(|_| ()));
        Ok(())
    }

    /// # Safety
    /// The stream lives as long as the command scope; the moves are checked; the frame rule, until
    /// the command scope ends.
    unsafe fn enqueue_copy(
        &self,
        moves: &[FrameMove],
        stream: CUstream,
        grid: u32,
    ) -> Result<CommandScope<'_>, StorageError> {
        let inner = &*self.inner;
        let n_pieces = inner.pieces.list.len();
        let (pieces, n_pieces) = (inner.table.address(), n_pieces as u32);
        inner.device.good()?;
        // SAFETY: the stream lives.
        let mut commands = unsafe { CommandScope::on(&inner.device, stream) };
        // Jobs are counted in 31 bits.
        let most = (i32::MAX as usize / n_pieces.max(1) as usize).clamp(1, BYTES_MAX / size_of::<Move>());
        for moves in moves.chunks(most) {
            let list: Vec<Move> =
                moves.iter().map(|step| Move { src: step.src.0, dst: step.dst.0 }).collect();
            let params = CopyParams {
                pieces,
                moves: commands.upload(bytes_of(&list))?,
                n_pieces,
                n_moves: list.len() as u32,
                unit: inner.pieces.copy_unit,
                reserved: 0,
            };
            // SAFETY: the tables live until the command scope ends; the rest is the caller's
            // promise.
            unsafe { commands.launch(Kernel::Copy, grid, &params)? };
        }
        Ok(commands)
    }

    /// Implements [`Storage::zero`].
    ///
    /// # Safety
    /// The frame rule.
    pub(super) unsafe fn zero_runs(&self, runs: &[Run]) -> Result<(), StorageError> {
        check::runs_disjoint(runs, self.frames())?;
        self.inner.device.good()?;
        let frames: Vec<u32> = runs.iter().flat_map(|run| run.frames()).map(|frame| frame.0).collect();
        // SAFETY: frames that exist and are distinct; the rest is the caller's promise.
        match unsafe { self.launch_zeroes(&frames) } {
            // The caller frees these frames, and must not fail for lack of a buffer. SAFETY: as
            // above.
            Err(error) if !error.is_lost() => unsafe { self.fill_zeroes(&frames) },
            outcome => outcome,
        }
    }

    /// # Safety
    /// The frames exist and are distinct; the frame rule.
    unsafe fn launch_zeroes(&self, frames: &[u32]) -> Result<(), StorageError> {
        let inner = &*self.inner;
        // SAFETY: the stream lives as long as the storage.
        let mut commands = unsafe { CommandScope::on(&inner.device, self.packing.raw()) };
        let n_pieces = inner.pieces.list.len();
        let most = (i32::MAX as usize / n_pieces).clamp(1, BYTES_MAX / size_of::<u32>());
        for frames in frames.chunks(most) {
            let params = ZeroParams {
                pieces: inner.table.address(),
                frames: commands.upload(bytes_of(frames))?,
                n_pieces: n_pieces as u32,
                n_frames: frames.len() as u32,
                unit: inner.pieces.copy_unit,
                reserved: 0,
            };
            // SAFETY: the caller's promise.
            unsafe { commands.launch(Kernel::Zero, self.grid(frames.len() * n_pieces), &params)? };
        }
        commands.wait()
    }

    /// Zeroes frames piece by piece: slower, but without a buffer, a kernel or an event.
    ///
    /// # Safety
    /// As for [`launch_zeroes`](Self::launch_zeroes).
    #[cold]
    unsafe fn fill_zeroes(&self, frames: &[u32]) -> Result<(), StorageError> {
        let context = &self.inner.device.0.context;
        let _entered = context.enter()?;
        let mut filled = Ok(());
        for (&frame, piece) in
            frames.iter().flat_map(|frame| self.inner.pieces.list.iter().map(move |piece| (frame, piece)))
        {
            let (at, bytes) = (piece.base + u64::from(frame) * piece.frame_stride, piece.bytes as usize);
            // SAFETY: the piece of a frame that exists and that the caller owns; the stream lives.
            let asked = unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.packing.raw()) };
            filled = context.check(asked, "zeroing frames");
            if filled.is_err() {
                break;
            }
        }
        // Wait for the enqueued work in any case.
        self.packing.synchronise().and(filled)
    }
}
