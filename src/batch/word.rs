//! The clock's word: the newest ticket and the number of batches in flight, so that one load answers both "which
//! batches could have seen this frame" and "is there any batch at all".
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..20 | in flight | batches begun and not ended |
//! | 20..64 | ticket | the ticket of the batch that began last; 0 before the first |

use crate::ids::Ticket;

const IN_FLIGHT_BITS: u32 = 20;
const TICKET_BITS: u32 = 44;
const _: () = assert!(IN_FLIGHT_BITS + TICKET_BITS == u64::BITS);

/// See the [module](self).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClockWord(u64);

impl ClockWord {
    const IN_FLIGHT_MASK: u64 = (1 << IN_FLIGHT_BITS) - 1;
    /// The most batches that may be in flight at once. Half of what the field holds, so that those who try to begin one
    /// more do not carry into the ticket before they are refused.
    pub const IN_FLIGHT_MAX: u64 = 1 << (IN_FLIGHT_BITS - 1);
    /// Added to the word, begins a batch.
    pub const BEGIN: u64 = 1 << IN_FLIGHT_BITS | 1;
    /// Subtracted from the word, ends a batch.
    pub const END: u64 = 1;

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
        Ticket(self.0 >> IN_FLIGHT_BITS)
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
}
