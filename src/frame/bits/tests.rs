//! Compares every function with a naive implementation: all 16-bit words, spread, and random words.

use proptest::prelude::*;

use super::*;

fn naive_runs(word: u64) -> Vec<(u32, u32)> {
    let mut found: Vec<(u32, u32)> = Vec::new();
    for pos in (0..64).filter(|pos| word >> pos & 1 == 1) {
        match found.last_mut() {
            Some((start, len)) if *start + *len == pos => *len += 1,
            _ => found.push((pos, 1)),
        }
    }
    found
}

fn naive_aligned(word: u64, order: usize) -> Vec<u32> {
    let len = 1u32 << order;
    (0..64).step_by(len as usize).filter(|&pos| word & ones(pos, len) == ones(pos, len)).collect()
}

fn check(word: u64) {
    assert_eq!(runs(word).collect::<Vec<_>>(), naive_runs(word));
    let longest = naive_runs(word).iter().map(|run| run.1).max();
    assert_eq!(longest_run(word).map(|run| run.1), longest);
    assert!(longest_run(word).is_none_or(|run| naive_runs(word).contains(&run)));

    let orders = (0..CLASSES).take_while(|&order| !naive_aligned(word, order).is_empty()).count();
    assert_eq!(classes(word), orders, "{word:#x}");

    for order in 0..CLASSES {
        let places = naive_aligned(word, order);
        match best_aligned(word, order) {
            None => assert!(places.is_empty()),
            Some(pos) => {
                assert!(places.contains(&pos), "{word:#x} order {order} at {pos}");
                let lonely = |pos: &u32| !places.contains(&(pos ^ 1 << order));
                let top = order + 1 == CLASSES;
                assert!(top || lonely(&pos) || !places.iter().any(lonely), "a larger run was broken up");
            }
        }
    }
    for len in 1..=FAN as u32 {
        let tightest = naive_runs(word).iter().map(|run| run.1).filter(|&run| run >= len).min();
        match best_run(word, len) {
            None => assert_eq!(tightest, None, "{word:#x} len {len}"),
            Some(pos) => {
                let run =
                    naive_runs(word).into_iter().find(|run| run.0 == pos).expect("begins a maximal run");
                assert_eq!(Some(run.1), tightest, "{word:#x} len {len}");
                assert!(classes(word) > class_that_may_hold(len), "{word:#x} len {len}");
            }
        }
        if class_that_holds(len) < CLASSES && classes(word) > class_that_holds(len) {
            assert!(best_run(word, len).is_some());
        }
    }
}

#[test]
fn every_word_of_sixteen_bits() {
    for low in (0..=u16::MAX).step_by(if cfg!(miri) { 9973 } else { 1 }) {
        let word = u64::from(low);
        check(if low & 1 == 0 { word } else { word << 40 | word >> 8 });
    }
}

#[test]
fn ones_at_the_edges() {
    assert_eq!(ones(0, 64), !0);
    assert_eq!(ones(63, 1), 1 << 63);
    assert_eq!(ones(5, 0), 0);
    assert_eq!(ones(4, 3), 0b111_0000);
    check(0);
    check(!0);
    check(1 << 63);
}

proptest! {
    #[test]
    fn random_words(a: u64, b: u64, c: u64) {
        check(a);
        check(a & b & c);
        check(a | b | c);
    }

    #[test]
    fn low_bits_are_the_lowest(word: u64, count in 0u32..=70) {
        let low = low_bits(word, count);
        prop_assert_eq!(low & !word, 0);
        prop_assert_eq!(low.count_ones(), count.min(word.count_ones()));
        let rest = word & !low;
        prop_assert!(low == 0 || rest == 0 || low.leading_zeros() > rest.leading_zeros() || low < rest & rest.wrapping_neg());
    }
}
