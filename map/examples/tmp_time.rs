use std::time::Instant;
use kvpool::compact::{FrameKind, FrameState, Snapshot};
use kvpool::{FrameId, Order, SequenceId};
use kvpool_map::{draw, Picture, sequences};
fn main() {
    for (name, cut) in [("mixed", 1u64), ("long", 40)] {
        let mut x = 88172645463325252u64; let mut left = 0; let mut s = 0u32; let mut kind = 0;
        let frames: Vec<FrameState> = (0..1_000_000u32).map(|i| {
            if left == 0 { x ^= x << 13; x ^= x >> 7; x ^= x << 17; left = 1 + x % (2 * cut); kind = (x >> 20) % 10; s = (x >> 30) as u32 % 5000; }
            left -= 1;
            match kind { 0..=1 => FrameState::FREE, 2..=3 => FrameState::evictable(FrameId(i)), _ => FrameState::new(FrameKind::Movable, Some((s, i % 4000))) }
        }).collect();
        let snapshot = Snapshot::new(Order(5), frames, (0..5000).map(SequenceId).collect());
        let mut best = [f64::MAX; 2]; let mut len = 0;
        for _ in 0..7 {
            let t = Instant::now();
            let text = draw(&Picture { title: "a".to_owned(), notes: vec![], panels: vec![("Now", &snapshot)] });
            len = text.len();
            best[0] = best[0].min(t.elapsed().as_secs_f64() * 1e3);
            let t = Instant::now();
            std::hint::black_box(sequences(&snapshot, 4096, 16));
            best[1] = best[1].min(t.elapsed().as_secs_f64() * 1e3);
        }
        println!("{name}: draw {:.1} ms, {len} bytes; sequences {:.1} ms", best[0], best[1]);
    }
}
