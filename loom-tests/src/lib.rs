//! What the models share: a bounded checker that reports what it explored.
