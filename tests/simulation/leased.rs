//! Leases of one block each: written, sealed, reopened, shared and pinned.

use kvpool::{AllocRequest, BlockHandle, BlockPin, FrameId, Lease};
use kvpool_testkit::leases::{handle, split};

use super::device::Token;
use super::sequences::some_priority;
use super::world::World;

/// A leased block.
pub struct Leased {
    pub handle: BlockHandle,
    /// A lease for each reference.
    pub leases: Vec<Lease<'static>>,
    pins: Vec<BlockPin>,
    is_pinned: bool,
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

    pub fn allocate_leased(&mut self) {
        let request = self.some_request();
        let outcome = self.pool.allocate_owned(request);
        self.note(format_args!("{request:?}: {outcome:?}"));
        match outcome {
            Ok(lease) => self.take_in(request, lease),
            Err(error) => self.is_refused_rightly(&error, request.contiguous),
        }
    }

    /// Allocates most free blocks one by one, frees every other one and seals the rest: some empty,
    /// some written.
    pub fn scatter_leased(&mut self) {
        let (before, free) = (self.all_leased.len(), self.pool.available_blocks());
        for _ in 0..self.rng.usize(..=free) {
            match self.pool.allocate_owned(AllocRequest::new(1)) {
                Ok(lease) => self.take_in(AllocRequest::new(1), lease),
                Err(error) => return self.is_refused_rightly(&error, false),
            }
        }
        if self.rng.bool() {
            self.write_leased();
            if let Some(batch) = self.batches.pop() {
                self.device.end_batch(batch.number);
                batch.batch.finish();
            }
        }
        let scattered = self.all_leased.split_off(before);
        self.all_leased.extend(scattered.into_iter().skip(1).step_by(2));
        self.seal_leased();
    }

    /// Adds blocks that the engine now owns.
    pub fn take_in(&mut self, request: AllocRequest, lease: Lease<'static>) {
        assert_eq!(lease.blocks().len(), request.blocks);
        let frames: Vec<FrameId> = lease.frames().collect();
        let is_run = frames.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0);
        assert!(is_run || !request.contiguous, "no run: {frames:?}");
        self.note(format_args!("{frames:?}"));
        self.tally.allocated += frames.len() as u64;
        self.all_leased.extend(split(lease).into_iter().zip(frames).map(|(lease, frame)| Leased {
            handle: handle(&lease),
            leases: vec![lease],
            pins: Vec::new(),
            is_pinned: request.pinned,
            pinned_in: request.pinned.then_some(frame),
            is_sealed: false,
            tokens: None,
            writer: 0,
        }));
    }

    /// Picks some of them, sometimes only one.
    fn some_leased(&mut self) -> Vec<usize> {
        let one_in = 1 + self.rng.usize(..4) * self.rng.usize(..8);
        (0..self.all_leased.len()).filter(|_| self.rng.usize(..one_in) == 0).collect()
    }

    pub fn write_leased(&mut self) {
        let batch = self.some_batch();
        let number = self.batches[batch].number;
        let block_tokens = self.block_tokens;
        for index in self.some_leased() {
            let leased = &mut self.all_leased[index];
            if leased.is_sealed || leased.leases.len() > 1 {
                continue;
            }
            let frame = self.pool.info(leased.handle).unwrap().frame.index();
            let mut tokens = vec![0; block_tokens];
            for (offset, token) in tokens.iter_mut().enumerate() {
                self.last += 1;
                *token = self.last;
                let slot = frame * block_tokens + offset;
                self.device.write(number, Token { slot, block: leased.handle, value: *token });
            }
            leased.tokens = Some(tokens);
            leased.writer = leased.writer.max(number);
            // All earlier writers must have ended before it is sealed: the stream is in order.
        }
    }

    pub fn seal_leased(&mut self) {
        for index in self.some_leased() {
            // A batch that began earlier may have been the last to write.
            let is_written = self.batches.iter().all(|batch| batch.number > self.all_leased[index].writer);
            let leased = &mut self.all_leased[index];
            if is_written && !leased.is_sealed {
                leased.leases[0].seal(..);
                leased.is_sealed = true;
            }
        }
    }

    pub fn reopen_leased(&mut self) {
        let Some(index) = self.pick(self.all_leased.len()) else { return };
        let leased = &mut self.all_leased[index];
        let info = self.pool.info(leased.handle).unwrap();
        assert_eq!(info.sealed, leased.is_sealed);
        let refs = leased.leases.len();
        let is_open = leased.leases[0].reopen(0);
        let stays = leased.is_sealed && (refs > 1 || self.device.is_source(info.frame));
        if leased.is_sealed || refs == 1 {
            assert_eq!(is_open, !stays, "{info:?}");
        }
        leased.is_sealed = stays;
    }

    pub fn share_leased(&mut self) {
        for index in self.some_leased() {
            let leased = &mut self.all_leased[index];
            let shared = leased.leases[0].share().unwrap();
            leased.leases.push(shared);
        }
    }

    pub fn pin_leased(&mut self) {
        for index in self.some_leased() {
            let leased = &mut self.all_leased[index];
            if leased.pins.len() < 14 {
                leased.pins.push(self.pool.pin_scoped(leased.handle).unwrap());
                leased.pinned_in = Some(self.pool.info(leased.handle).unwrap().frame);
            }
        }
        self.check_pins();
    }

    pub fn unpin_leased(&mut self) {
        self.check_pins();
        for index in self.some_leased() {
            let leased = &mut self.all_leased[index];
            leased.pins.pop();
            if leased.pins.is_empty() && !leased.is_pinned {
                leased.pinned_in = None;
            }
        }
    }

    /// Pins a sequence's block by a forged handle: any caller can make one up, because a refusal
    /// reveals the generation. The pin ends with the block.
    pub fn pin_forged(&mut self) {
        let Some(index) = self.pick(self.sequences.len()) else { return };
        let blocks: Vec<_> = self.sequences[index].real.blocks().collect();
        let Some(block) = self.pick(blocks.len()) else { return };
        let handle = self.pool.blocks().handle(blocks[block]);
        if self.forged.len() < 12
            && let Ok(pin) = self.pool.pin_scoped(handle)
        {
            self.forged.push((pin, self.pool.info(handle).unwrap().frame));
        }
    }

    pub fn unpin_forged(&mut self) {
        self.check_pins();
        if let Some(index) = self.pick(self.forged.len()) {
            drop(self.forged.swap_remove(index));
        }
    }

    /// Checks that pinned blocks stay in their frames.
    pub fn check_pins(&self) {
        for (pin, frame) in &self.forged {
            if let Ok(info) = self.pool.info(pin.handle()) {
                assert!(info.frame == *frame && info.pins > 0, "{info:?} was pinned in {frame}");
            }
        }
        for leased in &self.all_leased {
            let info = self.pool.info(leased.handle).unwrap();
            let (refs, pins) = (leased.leases.len(), leased.pins.len() + usize::from(leased.is_pinned));
            let expected = (refs as u32, pins as u32, leased.is_sealed);
            assert_eq!((info.refs, info.pins, info.sealed), expected, "{info:?}");
            assert!(leased.pinned_in.is_none_or(|frame| frame == info.frame), "{info:?} was pinned");
        }
    }

    pub fn free_leased(&mut self) {
        let chosen = self.some_leased();
        let freed: Vec<_> = chosen.iter().map(|&index| self.all_leased[index].handle.id).collect();
        chosen.iter().for_each(|&index| drop(self.all_leased[index].leases.pop()));
        self.all_leased.retain(|leased| !leased.leases.is_empty());
        self.note(format_args!("freed {freed:?}"));
    }

    /// Frees all of them.
    pub fn free_all(&mut self) {
        self.all_leased.clear();
    }

    pub fn read_leased(&mut self) {
        let batch = self.some_batch();
        for index in self.some_leased() {
            self.read_leased_in(batch, index);
        }
    }

    pub fn read_leased_in(&mut self, batch: usize, index: usize) {
        let Leased { handle, ref tokens, .. } = self.all_leased[index];
        let frame = self.pool.info(handle).unwrap().frame.index();
        for (offset, &value) in tokens.iter().flatten().enumerate() {
            let token = Token { slot: frame * self.block_tokens + offset, block: handle, value };
            self.device.read(self.batches[batch].number, token);
            self.tally.tokens_read += 1;
        }
    }
}
