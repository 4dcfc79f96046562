//! The clock's word. One load tells a thread that frees or allocates which batches could have seen
//! the frame, whether to announce, and whether the pool still allocates.
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..17 | in flight | batches begun and not ended |
//! | 17 | awaited | a request waits for blocks: blocks that become available are announced |
//! | 18 | lost | the device has failed: no blocks are allocated; set once and never cleared |
//! | 19 | end awaited | a task waits for the end of a batch: each end checks the [list](super::ends) of tasks |
//! | 20..64 | ticket | the ticket of the batch that began last; 0 before the first |
//!
//! The word is *quiet* if no batch is in flight and no request waits: a free is then short.

use crate::ids::Ticket;

const IN_FLIGHT_BITS: u32 = 17;
const AWAITED_BITS: u32 = 1;
const LOST_BITS: u32 = 1;
const END_AWAITED_BITS: u32 = 1;
/// Width of a ticket: at a batch each millisecond, tickets last for five centuries.
pub(super) const TICKET_BITS: u32 = 44;
const TICKET_SHIFT: u32 = IN_FLIGHT_BITS + AWAITED_BITS + LOST_BITS + END_AWAITED_BITS;
const _: () = assert!(TICKET_SHIFT + TICKET_BITS == u64::BITS);

/// State of a [`Clock`](super::Clock), in one atomic word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClockWord(u64);

impl ClockWord {
    const IN_FLIGHT_MASK: u64 = (1 << IN_FLIGHT_BITS) - 1;
    /// Maximum number of batches in flight: half of the range, so that concurrent failing attempts
    /// do not carry into the ticket.
    pub const IN_FLIGHT_MAX: u64 = 1 << (IN_FLIGHT_BITS - 1);
    /// Added to begin a batch.
    pub const BEGIN: u64 = 1 << TICKET_SHIFT | 1;
    /// Subtracted to end a batch.
    pub const END: u64 = 1;
    /// A request waits for blocks.
    pub const AWAITED: u64 = 1 << IN_FLIGHT_BITS;
    /// The device has failed.
    pub const LOST: u64 = 1 << (IN_FLIGHT_BITS + AWAITED_BITS);
    /// A task waits for the end of a batch.
    pub const END_AWAITED: u64 = 1 << (IN_FLIGHT_BITS + AWAITED_BITS + LOST_BITS);

    /// Creates the word from its bits.
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the number of batches in flight.
    #[inline]
    pub const fn in_flight(self) -> u64 {
        self.0 & Self::IN_FLIGHT_MASK
    }

    /// Returns the newest ticket.
    #[inline]
    pub const fn newest(self) -> Ticket {
        Ticket(self.0 >> TICKET_SHIFT)
    }

    /// Returns whether a request waits for blocks.
    #[inline]
    pub const fn is_awaited(self) -> bool {
        self.0 & Self::AWAITED != 0
    }

    /// Returns whether a task waits for the end of a batch.
    #[inline]
    pub const fn is_end_awaited(self) -> bool {
        self.0 & Self::END_AWAITED != 0
    }

    /// Returns whether the device is lost.
    #[inline]
    pub const fn is_lost(self) -> bool {
        self.0 & Self::LOST != 0
    }

    /// Returns whether the word is quiet.
    #[inline]
    pub const fn is_quiet(self) -> bool {
        self.0 & (Self::IN_FLIGHT_MASK | Self::AWAITED) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begin_and_end_touch_their_own_fields() {
        let mut bits = 0u64;
        for n in 1..=1000u64 {
            bits += ClockWord::BEGIN;
            assert_eq!(ClockWord::from_bits(bits).newest(), Ticket(n));
            assert_eq!(ClockWord::from_bits(bits).in_flight(), n);
        }
        for n in (0..1000u64).rev() {
            bits -= ClockWord::END;
            assert_eq!(ClockWord::from_bits(bits).newest(), Ticket(1000));
            assert_eq!(ClockWord::from_bits(bits).in_flight(), n);
        }
    }

    #[test]
    fn a_word_is_quiet_without_batches_and_waiting_requests() {
        for begun in 0..3 {
            const FLAGS: [u64; 3] = [ClockWord::AWAITED, ClockWord::LOST, ClockWord::END_AWAITED];
            for set in 0..8 {
                let flags: u64 = (0..3).filter(|flag| set >> flag & 1 == 1).map(|flag| FLAGS[flag]).sum();
                for ended in 0..=begun {
                    let word =
                        ClockWord::from_bits((flags + begun * ClockWord::BEGIN) - ended * ClockWord::END);
                    assert_eq!(word.is_awaited(), flags & ClockWord::AWAITED != 0);
                    assert_eq!(word.is_lost(), flags & ClockWord::LOST != 0);
                    assert_eq!(word.is_end_awaited(), flags & ClockWord::END_AWAITED != 0);
                    assert_eq!((word.newest(), word.in_flight()), (Ticket(begun), begun - ended));
                    assert_eq!(word.is_quiet(), !word.is_awaited() && begun == ended);
                }
            }
        }
    }
}
