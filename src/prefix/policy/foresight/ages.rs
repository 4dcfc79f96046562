//! How often blocks are reused at each age, and what a block of some age is therefore worth.
//!
//! Ages are counted in blocks released since, not in seconds: that is what an age costs in memory, it needs no clock, and a
//! busy hour and a quiet one look alike. They lie in bins of half an octave.
//!
//! Blocks are in [`CLASSES`] by their score. For each class and bin two sums are kept: reuses seen, and *exposure*, the
//! blocks times the time for which they were in that bin and could have been reused. Their quotient is the hazard. With few
//! observations it is drawn to that of all classes, times the class's risk; and that, where nothing is known yet, to a
//! guess that falls with the cube of the age beyond the mean: what was never seen to be reused at such an age goes first,
//! and the policy is LRU there.
//!
//! The *index* of a class and age is the most reuses that a block of it can bring for the time it is kept from now on,
//! `max over T of P(reuse within T) / E[time until reuse or T]`. To serve a set of such candidates by the highest index is
//! the best order there is if one place is to be filled (Gittins, 1979). Hit density as LHD has it (NSDI 2018) takes
//! another horizon for the same quotient.

use std::array;

use crate::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Classes by score.
pub(super) const CLASSES: usize = 15;
/// Bins of age, half an octave each; the last has no end.
pub(super) const BINS: usize = 48;
/// Blocks released that make the first bin about as long as a request.
const UNIT: u64 = 16;
/// The width of a class in units of the score.
const CLASS_WIDTH: f32 = 0.3;

/// Reuses that a guess counts as: of the hazard of all classes, and of that of one.
const ALL_GUESS: f64 = 10.0;
const CLASS_GUESS: f64 = 20.0;
/// How steeply the guess falls beyond the mean age.
const GUESS_FALL: i32 = 3;
/// A survival below this ends the sum over the ages to come.
const SURVIVAL_MIN: f64 = 1e-4;

/// The bin of an age.
pub(super) const fn bin(age: u64) -> usize {
    let age = if age > 1 << 31 { 1 << 31 } else { age };
    match (age * age / (UNIT * UNIT)).checked_ilog2() {
        None => 0,
        Some(log) if log as usize >= BINS => BINS - 1,
        Some(log) => log as usize,
    }
}

/// The age at which a bin begins.
fn begins(bin: usize) -> f64 {
    if bin == 0 { 0.0 } else { UNIT as f64 * (bin as f64 / 2.0).exp2() }
}

/// A figure that threads add to.
struct Sum(AtomicU64);

impl Sum {
    fn new() -> Self {
        Self(AtomicU64::new(0f64.to_bits()))
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    /// Relaxed, and a store: what another thread adds in between is lost, a grain of statistics.
    fn add(&self, amount: f64) {
        self.0.store((self.get() + amount).to_bits(), Relaxed);
    }

    fn halve(&self) {
        self.0.store((self.get() / 2.0).to_bits(), Relaxed);
    }
}

/// What was seen in a bin.
struct Seen {
    reuses: Sum,
    exposure: Sum,
}

impl Seen {
    fn new() -> Self {
        Self { reuses: Sum::new(), exposure: Sum::new() }
    }

    /// The hazard, drawn to a guess that counts as so many reuses.
    fn hazard(&self, guess: f64, counts: f64) -> f64 {
        (self.reuses.get() + counts) / (self.exposure.get() + counts / guess)
    }

    fn halve(&self) {
        self.reuses.halve();
        self.exposure.halve();
    }
}

/// An `f32` that is computed anew from time to time.
type Computed = AtomicU32;

/// See the [module](self).
pub(super) struct Ages {
    /// Of all classes; exposure counts by the risk of who is exposed.
    all: [Seen; BINS],
    classes: [[Seen; BINS]; CLASSES],
    /// The hazard of a block of risk 1, as it was computed last.
    hazards: [Computed; BINS],
    indices: [[Computed; BINS]; CLASSES],
}

/// The class of a score.
pub(super) fn class_of(score: f32) -> usize {
    const MIDDLE: f32 = (CLASSES / 2) as f32;
    // Casts saturate.
    ((score / CLASS_WIDTH).round() + MIDDLE).clamp(0.0, (CLASSES - 1) as f32) as usize
}

/// The risk in the middle of a class.
fn risk_of(class: usize) -> f64 {
    ((class as f64 - (CLASSES / 2) as f64) * f64::from(CLASS_WIDTH)).exp()
}

impl Ages {
    /// Nothing seen yet.
    pub(super) fn new() -> Self {
        let computed = || array::from_fn(|_| Computed::new(0f32.to_bits()));
        Self {
            all: array::from_fn(|_| Seen::new()),
            classes: array::from_fn(|_| array::from_fn(|_| Seen::new())),
            hazards: computed(),
            indices: array::from_fn(|_| computed()),
        }
    }

    /// A block of a class and a risk was awaited from one age to another, standing for `weight` blocks. Returns how many
    /// reuses were to be expected of one.
    pub(super) fn awaited(&self, class: usize, risk: f64, weight: f64, from: u64, to: u64) -> f64 {
        let (from_age, to_age) = (from as f64, to as f64);
        let mut expected = 0.0;
        if to <= from {
            return expected;
        }
        for bin in bin(from)..=bin(to) {
            let end = if bin == BINS - 1 { to_age } else { begins(bin + 1).min(to_age) };
            let time = end - begins(bin).max(from_age);
            if time > 0.0 {
                self.all[bin].exposure.add(weight * risk * time);
                self.classes[class][bin].exposure.add(weight * time);
                expected += f64::from(f32::from_bits(self.hazards[bin].load(Relaxed))) * risk * time;
            }
        }
        expected
    }

    /// A block of a class was reused at an age, standing for `weight` blocks.
    pub(super) fn reused(&self, class: usize, weight: f64, age: u64) {
        self.all[bin(age)].reuses.add(weight);
        self.classes[class][bin(age)].reuses.add(weight);
    }

    /// What a block of a class is worth at an age.
    pub(super) fn index(&self, class: usize, age: u64) -> f32 {
        f32::from_bits(self.indices[class][bin(age)].load(Relaxed))
    }

    /// Counts the past half as much as before.
    pub(super) fn fade(&self) {
        self.all.iter().chain(self.classes.iter().flatten()).for_each(Seen::halve);
    }

    /// Computes hazards and indices from what was seen.
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
            let hazards = array::from_fn(|bin| seen[bin].hazard(hazards[bin] * risk, CLASS_GUESS));
            store(to, &indices(&hazards));
        }
    }
}

fn store(to: &[Computed; BINS], figures: &[f64; BINS]) {
    for (to, &figure) in to.iter().zip(figures) {
        to.store((figure as f32).to_bits(), Relaxed);
    }
}

/// The index at each age, from the hazard at each age.
fn indices(hazards: &[f64; BINS]) -> [f64; BINS] {
    /// Of a block at the beginning of a bin: the chance that it is reused there, the time until then or until the end, and
    /// the chance that it is not.
    struct Step {
        reuse: f64,
        time: f64,
        survival: f64,
    }
    let steps: [Step; BINS] = array::from_fn(|bin| {
        let (hazard, width) = (hazards[bin], begins(bin + 1) - begins(bin));
        let survival = (-hazard * width).exp();
        let reuse = 1.0 - survival;
        // A hazard near zero: the quotient below would be of two roundings.
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
