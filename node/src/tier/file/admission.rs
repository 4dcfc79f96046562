//! What keeps a drive from wearing out: keys that were seen before, and a rate of writes.

use std::time::Instant;

/// Keys that were put or evicted lately, as tags of 32 bits in sets of four, from which a new key
/// drives the oldest.
///
/// Two keys are taken for one with a probability of 2^-29, which admits a value too early and does
/// no harm.
pub(super) struct SeenKeys(Vec<[u32; 4]>);

impl SeenKeys {
    /// Creates a table that knows most of as many keys as a store has slots, and the newest of
    /// twice as many. It takes 8 to 16 bytes a slot.
    pub(super) fn new(slots: usize) -> Self {
        Self(vec![[0; 4]; slots.div_ceil(2).next_power_of_two()])
    }

    /// Notes a key by its hash. Returns whether it was known.
    pub(super) fn note(&mut self, hash: u64) -> bool {
        // Never 0, which is an empty place.
        let (set, tag) = (hash as usize & (self.0.len() - 1), (hash >> 32) as u32 | 1);
        let set = &mut self.0[set];
        let known = set.iter().position(|known| *known == tag);
        // The newest is first.
        set[..=known.unwrap_or(3)].rotate_right(1);
        set[0] = tag;
        known.is_some()
    }
}

/// A bucket of bytes that fills at a rate, and holds what one second brings.
pub(super) struct WriteRate {
    rate: f64,
    bytes: f64,
    at: Instant,
}

impl WriteRate {
    pub(super) fn new(bytes_per_second: u64, now: Instant) -> Self {
        let rate = bytes_per_second as f64;
        Self { rate, bytes: rate, at: now }
    }

    /// Takes bytes, unless earlier writes have used up the rate. A value larger than what is left
    /// is taken, and later ones pay for it: so values of any size pass, and the average holds.
    pub(super) fn takes(&mut self, bytes: usize, now: Instant) -> bool {
        let brought = now.saturating_duration_since(self.at).as_secs_f64() * self.rate;
        (self.bytes, self.at) = ((self.bytes + brought).min(self.rate), now);
        let takes = self.bytes > 0.0;
        self.bytes -= if takes { bytes as f64 } else { 0.0 };
        takes
    }

    /// Gives back what was taken for a write that did not take place.
    pub(super) fn refund(&mut self, bytes: usize) {
        self.bytes += bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_second_sight_of_a_key_is_known_and_old_keys_are_forgotten() {
        let (mut seen, mut random) = (SeenKeys::new(1000), fastrand::Rng::with_seed(1));
        let keys: Vec<u64> = (0..1000).map(|_| random.u64(..)).collect();
        let first = keys.iter().filter(|key| seen.note(**key)).count();
        let second = keys.iter().filter(|key| seen.note(**key)).count();
        assert_eq!(first, 0);
        assert!(second > 800, "{second} of 1000");
        (0..100_000).for_each(|_| _ = seen.note(random.u64(..)));
        assert_eq!(keys.iter().filter(|key| seen.note(**key)).count(), 0);
    }

    #[test]
    fn writes_keep_to_their_rate() {
        let now = Instant::now();
        let mut rate = WriteRate::new(1000, now);
        let taken = (0..10_000_u32).filter(|ms| rate.takes(300, now + Duration::from_millis((*ms).into())));
        // One second's worth at once, and ten seconds.
        let bytes = taken.count() * 300;
        assert!((10_700..=11_300).contains(&bytes), "{bytes}");
        // A value of more than a second's worth passes, and others wait for it.
        let later = now + Duration::from_secs(60);
        assert!(rate.takes(5000, later) && !rate.takes(1, later + Duration::from_millis(3900)));
        assert!(rate.takes(1, later + Duration::from_millis(4100)));
    }
}
