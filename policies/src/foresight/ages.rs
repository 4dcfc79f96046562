//! The rate of reuse at each age, and the worth of a block of some age that follows from it.
//!
//! Ages are counted in blocks released since, not in seconds: this is what an age costs in memory,
//! it needs no clock, and busy and quiet hours look alike. Ages lie in bins of half an octave.
//!
//! Blocks are in [`CLASSES`] by score. For each class and bin two sums are kept: the reuses seen,
//! and the *exposure*, blocks times the time that they spent in the bin and could have been reused.
//! Their quotient is the hazard. With few observations it is drawn towards the hazard of all
//! classes times the risk of the class; that hazard, without observations, is drawn towards a guess
//! that falls with the cube of the age beyond the mean. So a block of an age at which no reuse was
//! seen goes first, and there the policy is LRU.
//!
//! The *index* of a class and age is the highest rate of reuses that a block can bring from now on,
//! `max over T of P(reuse within T) / E[time until reuse or T]`. Serving such candidates by the
//! highest index is optimal if one place is to be filled (Gittins, 1979). The hit density of LHD
//! (NSDI 2018) uses another horizon for the same quotient.

use std::array;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Classes by score.
pub(super) const CLASSES: usize = 7;
/// Bins of age, half an octave each; the last is unbounded.
pub(super) const BINS: usize = 48;
/// Blocks released in the first bin: about the length of a request.
const UNIT: u64 = 16;
/// The width of a class in units of the score.
const CLASS_WIDTH: f32 = 0.6;

/// The weight of the guess of the hazard of all classes, in reuses.
const ALL_GUESS: f64 = 10.0;
/// The power of the age with which the guess falls beyond the mean age.
const GUESS_FALL: i32 = 3;
/// The survival below which the sum over later ages ends.
const SURVIVAL_MIN: f64 = 1e-4;

/// Returns the bin of an age.
pub(super) const fn bin(age: u64) -> usize {
    let age = if age > 1 << 31 { 1 << 31 } else { age };
    match (age * age / (UNIT * UNIT)).checked_ilog2() {
        None => 0,
        Some(log) if log as usize >= BINS => BINS - 1,
        Some(log) => log as usize,
    }
}

/// Returns the age at which a bin begins.
pub(super) fn begins(bin: usize) -> f64 {
    if bin == 0 { 0.0 } else { UNIT as f64 * (bin as f64 / 2.0).exp2() }
}

/// Passes each bin between two ages, and the time spent in it, to `part`.
pub(super) fn parts(from: u64, to: u64, mut part: impl FnMut(usize, f64)) {
    if to <= from {
        return;
    }
    let (from_age, to_age) = (from as f64, to as f64);
    for bin in bin(from)..=bin(to) {
        let end = if bin == BINS - 1 { to_age } else { begins(bin + 1).min(to_age) };
        let time = end - begins(bin).max(from_age);
        if time > 0.0 {
            part(bin, time);
        }
    }
}

/// A sum that threads add to.
pub(super) struct Sum(AtomicU64);

impl Sum {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0f64.to_bits()))
    }

    pub(super) fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    /// Adds an amount. Relaxed, and a store: a concurrent addition may be lost, which only costs
    /// accuracy.
    pub(super) fn add(&self, amount: f64) {
        self.0.store((self.get() + amount).to_bits(), Relaxed);
    }

    pub(super) fn halve(&self) {
        self.0.store((self.get() / 2.0).to_bits(), Relaxed);
    }
}

/// The observations of a bin.
struct Seen {
    reuses: Sum,
    exposure: Sum,
}

impl Seen {
    fn new() -> Self {
        Self { reuses: Sum::new(), exposure: Sum::new() }
    }

    /// Returns the hazard, drawn towards a guess with the weight of `counts` reuses.
    fn hazard(&self, guess: f64, counts: f64) -> f64 {
        (self.reuses.get() + counts) / (self.exposure.get() + counts / guess)
    }

    fn halve(&self) {
        self.reuses.halve();
        self.exposure.halve();
    }
}

/// An `f32` that is recomputed at intervals.
type Computed = AtomicU32;

/// Reuses and exposure by class and age, and the worth computed from them.
pub(super) struct Ages {
    /// The weight of the hazard of all classes in that of one class, in reuses.
    class_guess: f64,
    /// Of all classes; exposure is weighted by the risk of the exposed block.
    all: [Seen; BINS],
    classes: [[Seen; BINS]; CLASSES],
    /// The hazard of a block of risk 1, as last computed.
    hazards: [Computed; BINS],
    indices: [[Computed; BINS]; CLASSES],
}

/// Returns the class of a score.
pub(super) fn class_of(score: f32) -> usize {
    const MIDDLE: f32 = (CLASSES / 2) as f32;
    // Casts truncate, and saturate.
    ((score * (1.0 / CLASS_WIDTH) + MIDDLE + 0.5) as usize).min(CLASSES - 1)
}

/// Returns the risk in the middle of a class.
fn risk_of(class: usize) -> f64 {
    ((class as f64 - (CLASSES / 2) as f64) * f64::from(CLASS_WIDTH)).exp()
}

impl Ages {
    /// Creates sums without observations.
    pub(super) fn new(class_guess: f64) -> Self {
        let computed = || array::from_fn(|_| Computed::new(0f32.to_bits()));
        Self {
            class_guess,
            all: array::from_fn(|_| Seen::new()),
            classes: array::from_fn(|_| array::from_fn(|_| Seen::new())),
            hazards: computed(),
            indices: array::from_fn(|_| computed()),
        }
    }

    /// Counts a block that was awaited between two ages, with the weight of `weight` blocks.
    /// Returns the expected reuses of one block.
    pub(super) fn awaited(&self, class: usize, risk: f64, weight: f64, from: u64, to: u64) -> f64 {
        let mut expected = 0.0;
        parts(from, to, |bin, time| {
            self.all[bin].exposure.add(weight * risk * time);
            self.classes[class][bin].exposure.add(weight * time);
            expected += f64::from(f32::from_bits(self.hazards[bin].load(Relaxed))) * risk * time;
        });
        expected
    }

    /// Counts a reuse at an age, with the weight of `weight` blocks.
    pub(super) fn reused(&self, class: usize, weight: f64, age: u64) {
        self.all[bin(age)].reuses.add(weight);
        self.classes[class][bin(age)].reuses.add(weight);
    }

    /// Returns the worth of a block of a class at an age.
    pub(super) fn index(&self, class: usize, age: u64) -> f32 {
        self.index_of_bin(class, bin(age))
    }

    /// Returns the worth of a block of a class at an age in a bin.
    pub(super) fn index_of_bin(&self, class: usize, bin: usize) -> f32 {
        f32::from_bits(self.indices[class][bin].load(Relaxed))
    }

    /// Halves the weight of past observations.
    pub(super) fn fade(&self) {
        self.all.iter().chain(self.classes.iter().flatten()).for_each(Seen::halve);
    }

    /// Computes hazards and indices from the observations.
    pub(super) fn compute(&self) {
        let total = |of: fn(&Seen) -> &Sum| self.all.iter().map(|seen| of(seen).get()).sum::<f64>();
        let exposure = total(|seen| &seen.exposure);
        let average = (total(|seen| &seen.reuses) + 1e-9) / (exposure + 1.0);
        let weighed = (self.all.iter().enumerate())
            .map(|(bin, seen)| seen.exposure.get() * (begins(bin) + begins(bin + 1)) / 2.0);
        let mean_age = weighed.sum::<f64>() / (exposure + 1e-9);
        let hazards: [f64; BINS] = array::from_fn(|bin| {
            let guess = average * (mean_age / begins(bin).max(1.0)).clamp(1e-9, 1.0).powi(GUESS_FALL);
            self.all[bin].hazard(guess.max(1e-30), ALL_GUESS)
        });
        store(&self.hazards, &hazards);
        for (class, (seen, to)) in self.classes.iter().zip(&self.indices).enumerate() {
            let risk = risk_of(class);
            let hazards = array::from_fn(|bin| seen[bin].hazard(hazards[bin] * risk, self.class_guess));
            store(to, &indices(&hazards));
        }
    }
}

fn store(to: &[Computed; BINS], figures: &[f64; BINS]) {
    for (to, &figure) in to.iter().zip(figures) {
        to.store((figure as f32).to_bits(), Relaxed);
    }
}

/// Returns the index at each age, from the hazard at each age.
fn indices(hazards: &[f64; BINS]) -> [f64; BINS] {
    /// For a block at the beginning of a bin: the probability of a reuse in the bin, the expected
    /// time until the reuse or the end of the bin, and the probability of no reuse.
    struct Step {
        reuse: f64,
        time: f64,
        survival: f64,
    }
    let steps: [Step; BINS] = array::from_fn(|bin| {
        let (hazard, width) = (hazards[bin], begins(bin + 1) - begins(bin));
        let survival = (-hazard * width).exp();
        let reuse = 1.0 - survival;
        // With a hazard near zero the quotient would divide two rounding errors.
        let time = if hazard * width > 1e-9 { reuse / hazard } else { width };
        Step { reuse, time, survival }
    });
    array::from_fn(|age| {
        let (mut survival, mut reuse, mut time, mut best) = (1.0, 0.0, 0.0, 0f64);
        for step in &steps[age.min(BINS - 2)..BINS - 1] {
            reuse += survival * step.reuse;
            time += survival * step.time;
            survival *= step.survival;
            best = best.max(reuse / time);
            if survival < SURVIVAL_MIN {
                break;
            }
        }
        best
    })
}
