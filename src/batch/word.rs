//! The clock's word: the newest ticket, the number of batches in flight, whether somebody waits for blocks, and whether the
//! device is lost, so that one load answers all that whoever frees or takes a block must know: "which batches could have
//! seen this frame", "is there any batch at all", "is there anybody to be told", and "is there anything to be had".
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..18 | in flight | batches begun and not ended |
//! | 18 | awaited | somebody waits for blocks: what becomes available is announced |
//! | 19 | lost | the device has failed: nothing is handed out any more; set once and never cleared |
//! | 20..64 | ticket | the ticket of the batch that began last; 0 before the first |
//!
//! The word is *quiet* if no batch is in flight and nobody waits: its low half is zero, and a free goes the short way.

use crate::ids::Ticket;

const IN_FLIGHT_BITS: u32 = 18;
const AWAITED_BITS: u32 = 1;
const LOST_BITS: u32 = 1;
const TICKET_BITS: u32 = 44;
const _: () = assert!(IN_FLIGHT_BITS + AWAITED_BITS + LOST_BITS + TICKET_BITS == u64::BITS);
const TICKET_SHIFT: u32 = IN_FLIGHT_BITS + AWAITED_BITS + LOST_BITS;

/// See the [module](self).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClockWord(u64);

impl ClockWord {
    const IN_FLIGHT_MASK: u64 = (1 << IN_FLIGHT_BITS) - 1;
    /// The most batches that may be in flight at once. Half of what the field holds, so that those who try to begin one
    /// more do not carry into the ticket before they are refused.
    pub const IN_FLIGHT_MAX: u64 = 1 << (IN_FLIGHT_BITS - 1);
    /// Added to the word, begins a batch.
    pub const BEGIN: u64 = 1 << TICKET_SHIFT | 1;
    /// Subtracted from the word, ends a batch.
    pub const END: u64 = 1;
    /// The bit that says that somebody waits for blocks.
    pub const AWAITED: u64 = 1 << IN_FLIGHT_BITS;
    /// The bit that says that the device is lost.
    pub const LOST: u64 = 1 << (IN_FLIGHT_BITS + AWAITED_BITS);

    /// From its bits.
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Batches in flight.
    #[inline]
    pub const fn in_flight(self) -> u64 {
        self.0 & Self::IN_FLIGHT_MASK
    }

    /// The newest ticket.
    #[inline]
    pub const fn newest(self) -> Ticket {
        Ticket(self.0 >> TICKET_SHIFT)
    }

    /// Whether somebody waits for blocks.
    #[inline]
    pub const fn is_awaited(self) -> bool {
        self.0 & Self::AWAITED != 0
    }

    /// Whether the device is lost.
    #[inline]
    pub const fn is_lost(self) -> bool {
        self.0 & Self::LOST != 0
    }

    /// No batch is in flight, and nobody waits for blocks.
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
    fn a_word_is_quiet_when_nothing_goes_on_and_nobody_waits() {
        for begun in 0..3 {
            for flags in [0, ClockWord::AWAITED, ClockWord::LOST, ClockWord::AWAITED | ClockWord::LOST] {
                for ended in 0..=begun {
                    let word =
                        ClockWord::from_bits((flags + begun * ClockWord::BEGIN) - ended * ClockWord::END);
                    assert_eq!(word.is_awaited(), flags & ClockWord::AWAITED != 0);
                    assert_eq!(word.is_lost(), flags & ClockWord::LOST != 0);
                    assert_eq!((word.newest(), word.in_flight()), (Ticket(begun), begun - ended));
                    assert_eq!(word.is_quiet(), !word.is_awaited() && begun == ended);
                }
            }
        }
    }
}
