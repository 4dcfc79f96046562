//! A bounded lock-free stock of magazines, through which a thread that mostly frees supplies one
//! that mostly allocates. Frames in it cannot coalesce: it is small, and flushed before a failure.

use crate::sync::{AtomicUsize, CachePadded, Ordering::*};

use super::{Frames, Magazine, Stock};

/// Stock of full magazines, shared by all threads of a pool.
pub struct Depot {
    magazines: Stock<Magazine>,
    /// Never too low: incremented before a push, decremented after a pop.
    frames: CachePadded<AtomicUsize>,
}

impl Depot {
    /// Creates a depot for up to `magazines` magazines.
    pub fn new(magazines: usize) -> Self {
        Self { magazines: Stock::new(magazines.max(1)), frames: CachePadded::new(AtomicUsize::new(0)) }
    }

    /// Adds a magazine, or returns it if the depot is full.
    #[expect(clippy::result_large_err, reason = "a magazine is handed back by value: nothing is allocated")]
    pub fn push(&self, magazine: Magazine) -> Result<(), Magazine> {
        let frames = magazine.len();
        // Relaxed: a statistic; the stock orders the frames themselves.
        self.frames.fetch_add(frames, Relaxed);
        let pushed = self.magazines.push(magazine);
        if pushed.is_err() {
            self.frames.fetch_sub(frames, Relaxed);
        }
        pushed
    }

    /// Takes a magazine, if there is one.
    pub fn pop(&self) -> Option<Magazine> {
        let magazine = self.magazines.pop()?;
        self.frames.fetch_sub(magazine.len(), Relaxed);
        Some(magazine)
    }

    /// Frees every frame into `frames` and returns their number.
    pub fn flush(&self, frames: &Frames) -> usize {
        let mut flushed = 0;
        while let Some(mut magazine) = self.pop() {
            flushed += magazine.len();
            magazine.flush(frames);
        }
        flushed
    }

    /// Returns the number of free frames in the depot; exact without concurrent pushes and pops.
    pub fn frames(&self) -> usize {
        self.frames.load(Relaxed)
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;
    use crate::ids::FrameId;

    #[test]
    fn takes_as_many_as_it_has_room_for_last_in_first_out() {
        let depot = Depot::new(3);
        let magazine = |frame| {
            let mut magazine = Magazine::default();
            magazine.push(FrameId(frame));
            magazine
        };
        for round in 0..3 {
            for frame in 0..3 {
                assert!(depot.push(magazine(3 * round + frame)).is_ok());
            }
            assert_eq!(depot.push(magazine(99)).unwrap_err().pop(), Some(FrameId(99)));
            assert_eq!(depot.frames(), 3);
            for frame in (0..3).rev() {
                assert_eq!(depot.pop().unwrap().pop(), Some(FrameId(3 * round + frame)));
            }
            assert!(depot.pop().is_none());
        }
    }

    #[test]
    fn magazines_have_one_owner_among_threads() {
        const ROUNDS: u32 = if cfg!(miri) { 50 } else { 50_000 };
        let depot = Depot::new(2);
        let total: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|thread| {
                    let depot = &depot;
                    scope.spawn(move || {
                        let mut mine: Vec<Magazine> = Vec::new();
                        let mut magazine = Magazine::default();
                        (0..=thread).for_each(|i| magazine.push(FrameId(100 * thread + i)));
                        mine.push(magazine);
                        for round in 0..ROUNDS {
                            if (round + thread) % 3 == 0 {
                                mine.extend(depot.pop());
                            } else if let Some(magazine) = mine.pop()
                                && let Err(magazine) = depot.push(magazine)
                            {
                                mine.push(magazine);
                            }
                        }
                        mine.iter().map(Magazine::len).sum::<usize>()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        let left: usize = std::iter::from_fn(|| depot.pop()).map(|magazine| magazine.len()).sum();
        assert_eq!((total + left, depot.frames()), (1 + 2 + 3, 0));
    }
}
