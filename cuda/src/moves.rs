//! Copies and zeroing of whole frames.

use cudarc::driver::sys::CUstream;

use kvpool::Run;
use kvpool::StorageError;
use kvpool::storage::backend::check;
use kvpool::storage::{CopyDone, DeviceStream, FrameMove, Storage};

use super::command_scope::CommandScope;
use super::device::raw;
use super::launch::Work;
use super::memory::bytes_of;
use super::params::{CopyParams, MOVES_INLINE, Move, ZeroParams};
use super::staging::BYTES_MAX;
use super::storage::CudaStorage;

impl CudaStorage {
    /// Calls `done` when the commands are complete, or at once if they were refused: the command scope
    /// has then waited for those that it had enqueued. The commands keep the memory and the kernels
    /// alive.
    pub(super) fn report(&self, enqueued: Result<CommandScope<'_>, StorageError>, done: CopyDone) {
        match enqueued {
            Ok(commands) => commands.then(self.inner.clone(), done),
            Err(error) => done(Err(error)),
        }
    }

    /// Enqueues the copy of a wave, with its mark, and a nudge behind that on a stream of nudges.
    ///
    /// # Safety
    /// The frame rule, until the scope ends.
    pub(super) unsafe fn enqueue_wave(&self, moves: &[FrameMove]) -> Result<CommandScope<'_>, StorageError> {
        check::moves(moves, self.frames())?;
        let device = &self.inner.device.0;
        let _entered = device.context.enter()?;
        let beside = Work::WaveBeside { ctas: self.config.moving_ctas };
        let work = if device.watch.is_engine_busy() { beside } else { Work::Wave };
        // SAFETY: the caller's promise; the stream lives as long as the storage.
        let mut commands = unsafe { self.enqueue_copy(moves, self.stream_of(work).raw(), work)? };
        let mark = commands.mark()?;
        device.watch.nudge_of_wave(mark);
        Ok(commands)
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
        let _entered = self.inner.device.0.context.enter()?;
        self.inner.device.check_stream(stream, "copying frames")?;
        check::moves(moves, self.frames())?;
        let on = raw(stream);
        // SAFETY: as above; the stream is of this device.
        let mut commands = unsafe { self.enqueue_copy(moves, on, Work::Copy)? };
        // Under another batch, the host may store to the copy before this stream has executed
        // it.
        let mark = commands.mark()?.clone();
        self.inner.pending.begin(moves, &mark);
        let inner = self.inner.clone();
        let done = move |_| inner.pending.end(&mark);
        commands.then(stream.clone(), Box::new(done));
        Ok(())
    }

    /// # Safety
    /// The stream lives as long as the command scope; the moves are checked; the frame rule, until
    /// the command scope ends.
    pub(super) unsafe fn enqueue_copy(
        &self,
        moves: &[FrameMove],
        stream: CUstream,
        work: Work,
    ) -> Result<CommandScope<'_>, StorageError> {
        let inner = &*self.inner;
        let (pieces, n_pieces) = (inner.table.address(), inner.pieces.list.len());
        inner.device.good()?;
        // SAFETY: the stream lives.
        let mut commands = unsafe { CommandScope::on(&inner.device, stream) };
        let _entered = inner.device.0.context.enter()?;
        // Jobs are counted in 31 bits.
        let most = (i32::MAX as usize / n_pieces.max(1)).clamp(1, BYTES_MAX / size_of::<Move>());
        for moves in moves.chunks(most) {
            let mut params = CopyParams::new((pieces, n_pieces), (0, moves.len()), inner.pieces.copy_unit);
            let list = moves.iter().map(|step| Move { src: step.src.0, dst: step.dst.0 });
            if moves.len() <= MOVES_INLINE {
                params.few.iter_mut().zip(list).for_each(|(place, step)| *place = step);
            } else {
                params.moves = commands.upload(bytes_of(&list.collect::<Vec<Move>>()))?;
            }
            // SAFETY: the tables live until the command scope ends; the rest is the caller's
            // promise.
            unsafe { commands.launch(work, &params)? };
        }
        Ok(commands)
    }

    /// Enqueues the zeroing of these frames. The caller frees them, and must not fail for lack of a
    /// buffer or a kernel; on the watcher's thread it must not wait for the device either.
    ///
    /// # Safety
    /// The frame rule, until the scope ends.
    pub(super) unsafe fn enqueue_zeroes(&self, runs: &[Run]) -> Result<CommandScope<'_>, StorageError> {
        check::runs_disjoint(runs, self.frames())?;
        let frames: Vec<u32> = runs.iter().flat_map(|run| run.frames()).map(|frame| frame.0).collect();
        let _entered = self.inner.device.0.context.enter()?;
        // SAFETY: the stream lives as long as the storage.
        let mut commands = unsafe { CommandScope::on(&self.inner.device, self.stream_of(Work::Zero).raw()) };
        // SAFETY: frames that exist and are distinct; the rest is the caller's promise.
        match unsafe { self.launch_zeroes(&mut commands, &frames) } {
            // In the same scope, which keeps the buffers of a part that was enqueued. SAFETY: as above.
            Err(error) if !error.is_lost() => unsafe { self.fill_zeroes(&mut commands, &frames)? },
            outcome => outcome?,
        }
        Ok(commands)
    }

    /// # Safety
    /// The frames exist and are distinct; the frame rule.
    unsafe fn launch_zeroes(
        &self,
        commands: &mut CommandScope<'_>,
        frames: &[u32],
    ) -> Result<(), StorageError> {
        let inner = &*self.inner;
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
            unsafe { commands.launch(Work::Zero, &params)? };
        }
        Ok(())
    }

    /// Zeroes frames piece by piece: slower, but without a buffer or a kernel.
    ///
    /// # Safety
    /// As for [`launch_zeroes`](Self::launch_zeroes).
    #[cold]
    unsafe fn fill_zeroes(
        &self,
        commands: &mut CommandScope<'_>,
        frames: &[u32],
    ) -> Result<(), StorageError> {
        let pieces = &self.inner.pieces.list;
        for (&frame, piece) in frames.iter().flat_map(|frame| pieces.iter().map(move |piece| (frame, piece)))
        {
            let at = piece.base + u64::from(frame) * piece.frame_stride;
            // SAFETY: the piece of a frame that exists and that the caller owns.
            unsafe { commands.zero(at, piece.bytes as usize)? };
        }
        Ok(())
    }
}
