//! Raw handles: blocks whose references, pins and seals the engine counts itself.

use kvpool::{AllocRequest, BlockHandle, FrameId, HandleError};

use super::device::Token;
use super::sequences::some_priority;
use super::world::World;

/// A block that the engine owns by handle.
pub struct Raw {
    pub handle: BlockHandle,
    /// Number of references that the engine holds.
    pub refs: u32,
    pins: u32,
    /// Its frame when it was pinned.
    pinned_in: Option<FrameId>,
    is_sealed: bool,
    /// Its content, if it was written.
    tokens: Option<Vec<u64>>,
    /// The batch that wrote to it last.
    writer: u64,
}

impl World {
    /// Returns a random request.
    pub fn some_request(&mut self) -> AllocRequest {
        let many = if self.rng.u8(..12) == 0 { self.pool.total_blocks() } else { 8 };
        let mut request = AllocRequest::new(self.rng.usize(1..=many));
        request.priority = some_priority(&mut self.rng);
        request.contiguous = self.rng.u8(..3) == 0;
        request.pinned = self.rng.u8(..12) == 0;
        request
    }

    pub fn allocate_raw(&mut self) {
        let (request, way) = (self.some_request(), self.rng.usize(..3));
        let mut handles = Vec::new();
        let outcome = match self.handles.get(way) {
            Some(handle) => handle.allocate_raw(request, &mut handles),
            None => self.pool.allocate_raw(request, &mut handles),
        };
        self.note(format_args!("{request:?}: {outcome:?}"));
        match outcome {
            Ok(()) => self.take_in(request, &handles),
            Err(error) => self.is_refused_rightly(&error, request.contiguous),
        }
    }

    /// Allocates most free blocks one by one, frees every other one and seals the rest: some empty,
    /// some written.
    pub fn scatter_raw(&mut self) {
        let (before, free) = (self.raws.len(), self.pool.available_blocks());
        for _ in 0..self.rng.usize(..=free) {
            let mut handles = Vec::new();
            match self.pool.allocate_raw(AllocRequest::new(1), &mut handles) {
                Ok(()) => self.take_in(AllocRequest::new(1), &handles),
                Err(error) => return self.is_refused_rightly(&error, false),
            }
        }
        if self.rng.bool() {
            self.write_raw();
            if let Some(batch) = self.batches.pop() {
                self.device.end_batch(batch.number);
                batch.batch.finish();
            }
        }
        let scattered = self.raws.split_off(before);
        for (index, raw) in scattered.into_iter().enumerate() {
            if index % 2 == 0 {
                self.pool.free(&[raw.handle]).unwrap();
            } else {
                self.raws.push(raw);
            }
        }
        self.seal_raw();
    }

    /// Adds blocks that the engine now owns.
    pub fn take_in(&mut self, request: AllocRequest, handles: &[BlockHandle]) {
        assert_eq!(handles.len(), request.blocks);
        let frame = |handle: &BlockHandle| self.pool.info(*handle).unwrap().frame;
        let frames: Vec<FrameId> = handles.iter().map(frame).collect();
        let is_run = frames.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0);
        assert!(is_run || !request.contiguous, "no run: {frames:?}");
        self.note(format_args!("{frames:?}"));
        self.tally.allocated += handles.len() as u64;
        self.raws.extend(handles.iter().zip(frames).map(|(&handle, frame)| Raw {
            handle,
            refs: 1,
            pins: u32::from(request.pinned),
            pinned_in: request.pinned.then_some(frame),
            is_sealed: false,
            tokens: None,
            writer: 0,
        }));
    }

    /// Picks some of them, sometimes only one.
    fn some_raws(&mut self) -> Vec<usize> {
        let one_in = 1 + self.rng.usize(..4) * self.rng.usize(..8);
        (0..self.raws.len()).filter(|_| self.rng.usize(..one_in) == 0).collect()
    }

    pub fn write_raw(&mut self) {
        let batch = self.some_batch();
        let number = self.batches[batch].number;
        let block_tokens = self.block_tokens;
        for index in self.some_raws() {
            let raw = &mut self.raws[index];
            if raw.is_sealed || raw.refs > 1 {
                continue;
            }
            let frame = self.pool.info(raw.handle).unwrap().frame.index();
            let mut tokens = vec![0; block_tokens];
            for (offset, token) in tokens.iter_mut().enumerate() {
                self.last += 1;
                *token = self.last;
                let slot = frame * block_tokens + offset;
                self.device.write(number, Token { slot, block: raw.handle, value: *token });
            }
            raw.tokens = Some(tokens);
            raw.writer = raw.writer.max(number);
            // All earlier writers must have ended before it is sealed: the stream is in order.
        }
    }

    pub fn seal_raw(&mut self) {
        for index in self.some_raws() {
            // A batch that began earlier may have been the last to write.
            let is_written = self.batches.iter().all(|batch| batch.number > self.raws[index].writer);
            let raw = &mut self.raws[index];
            if is_written && !raw.is_sealed {
                self.pool.seal(raw.handle).unwrap();
                raw.is_sealed = true;
            }
        }
    }

    pub fn reopen_raw(&mut self) {
        let Some(index) = self.pick(self.raws.len()) else { return };
        let raw = &mut self.raws[index];
        let info = self.pool.info(raw.handle).unwrap();
        assert_eq!(info.sealed, raw.is_sealed);
        let is_open = self.pool.reopen(raw.handle).unwrap();
        let stays = raw.is_sealed && (raw.refs > 1 || self.device.is_source(info.frame));
        if raw.is_sealed || raw.refs == 1 {
            assert_eq!(is_open, !stays, "{info:?}");
        }
        raw.is_sealed = stays;
    }

    pub fn share_raw(&mut self) {
        for index in self.some_raws() {
            let raw = &mut self.raws[index];
            self.pool.share(&[raw.handle]).unwrap();
            raw.refs += 1;
        }
    }

    pub fn pin_raw(&mut self) {
        for index in self.some_raws() {
            let raw = &mut self.raws[index];
            if raw.pins < 15 {
                self.pool.pin(raw.handle).unwrap();
                raw.pins += 1;
                raw.pinned_in = Some(self.pool.info(raw.handle).unwrap().frame);
            }
        }
        self.check_pins();
    }

    pub fn unpin_raw(&mut self) {
        self.check_pins();
        for index in self.some_raws() {
            let raw = &mut self.raws[index];
            match self.pool.unpin(raw.handle) {
                Ok(()) => raw.pins -= 1,
                Err(error) => {
                    assert_eq!((error, raw.pins), (HandleError::NotPinned { id: raw.handle.id }, 0));
                }
            }
            if raw.pins == 0 {
                raw.pinned_in = None;
            }
        }
    }

    /// Checks that pinned blocks stay in their frames.
    pub fn check_pins(&self) {
        for raw in &self.raws {
            let info = self.pool.info(raw.handle).unwrap();
            assert_eq!((info.refs, info.pins, info.sealed), (raw.refs, raw.pins, raw.is_sealed), "{info:?}");
            assert!(raw.pinned_in.is_none_or(|frame| frame == info.frame), "{info:?} was pinned");
        }
    }

    pub fn free_raw(&mut self) {
        let (chosen, way) = (self.some_raws(), self.rng.usize(..3));
        let handles: Vec<_> = chosen.iter().map(|&index| self.raws[index].handle).collect();
        match self.handles.get(way) {
            Some(handle) => handle.free(&handles).unwrap(),
            None => self.pool.free(&handles).unwrap(),
        }
        chosen.iter().for_each(|&index| self.raws[index].refs -= 1);
        self.raws.retain(|raw| raw.refs > 0);
        self.note(format_args!("freed {:?}", handles.iter().map(|handle| handle.id).collect::<Vec<_>>()));
    }

    /// Frees all of them.
    pub fn free_all(&mut self) {
        for raw in self.raws.drain(..) {
            (0..raw.refs).for_each(|_| self.pool.free(&[raw.handle]).unwrap());
        }
    }

    pub fn read_raw(&mut self) {
        let batch = self.some_batch();
        for index in self.some_raws() {
            self.read_raw_in(batch, index);
        }
    }

    pub fn read_raw_in(&mut self, batch: usize, index: usize) {
        let Raw { handle, ref tokens, .. } = self.raws[index];
        let frame = self.pool.info(handle).unwrap().frame.index();
        for (offset, &value) in tokens.iter().flatten().enumerate() {
            let token = Token { slot: frame * self.block_tokens + offset, block: handle, value };
            self.device.read(self.batches[batch].number, token);
            self.tally.tokens_read += 1;
        }
    }
}
