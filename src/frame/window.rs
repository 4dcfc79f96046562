/// Returns the start and the cost of the cheapest window of `len` out of `frames` frames.
///
/// `cost` returns the cost of a frame, or `None` if no window may contain it. Of equally cheap
/// windows, the one with the smaller `tie` wins, then the first. One pass over all frames.
pub fn cheapest_window(
    frames: usize,
    len: usize,
    cost: impl Fn(usize) -> Option<u32>,
    tie: impl Fn(usize) -> u32,
) -> Option<(usize, u32)> {
    let mut best: Option<(u32, u32, usize)> = None;
    // Over at most the last `len` frames since the last one that no window may contain.
    let (mut sum, mut clear) = (0, 0);
    for last in 0..frames {
        let Some(one) = cost(last) else {
            (sum, clear) = (0, 0);
            continue;
        };
        sum += one;
        clear += 1;
        if clear > len {
            sum -= cost(last - len).unwrap_or(0);
        }
        if clear < len || best.is_some_and(|(least, _, _)| least < sum) {
            continue;
        }
        let start = last + 1 - len;
        let this = (sum, tie(start), start);
        best = Some(best.map_or(this, |best| best.min(this)));
    }
    best.map(|(cost, _, start)| (start, cost))
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_cheapest_window_is_found() {
        let cheapest = |text: &str, len, tie: fn(usize) -> u32| {
            let cost = |at: usize| match text.as_bytes()[at] {
                b'.' => Some(0),
                b'e' => Some(1),
                _ => None,
            };
            cheapest_window(text.len(), len, cost, tie)
        };
        assert_eq!(cheapest("ee.xe.e.x...e", 4, |_| 0), Some((9, 1)));
        assert_eq!(cheapest("ee.xe.e.x..xe", 4, |_| 0), Some((4, 2)));
        assert_eq!(cheapest("ee.xe.e.x..xe", 5, |_| 0), None);
        assert_eq!(cheapest("..", 3, |_| 0), None);
        assert_eq!(cheapest("e", 1, |_| 0), Some((0, 1)));
        assert_eq!(cheapest("..e..", 2, |start| 9 - start as u32), Some((3, 0)), "of equal ones");
    }
}
