//! A cell with one owner that other threads may visit.
//!
//! | field | written by | meaning |
//! |---|---|---|
//! | `inside` | the owner | the owner is in its section |
//! | `visited` | any other thread, by compare-exchange | a visitor has the value, or is about to check `inside` |
//!
//! ```text
//! owner:    inside := 1;  light_fence;  if visited { inside := 0; go without }  ...value...  inside := 0
//! visitor:  visited: 0 -> 1;  heavy_fence;  if inside { visited := 0; go away } ...value...  visited := 0
//! ```
//!
//! Dekker's pattern with an asymmetric fence: of two sides that overlap, one sees the other.
//!
//! # Invariants
//!
//! - Access to the value is exclusive between a thread's successful check and its final store.
//! - No side waits: the one that sees the other backs out, and its caller has an alternative (the
//!   owner uses the global structure, the visitor the next cell). A stopped owner makes only its
//!   cell's contents unavailable; a stopped visitor, those of its current group of cells.
//!
//! Model: `loom-tests/tests/owner_cell.rs`.

use smallvec::SmallVec;

use crate::sync::{AtomicBool, Ordering::*, UnsafeCell, heavy_fence, light_fence};

/// Number of cells visited per heavy fence.
const AT_ONCE: usize = if cfg!(kvpool_loom) { 2 } else { 16 };

/// A cell with one owner, which any other thread may visit while the owner is outside. Entering
/// costs the owner two plain stores and a compiler fence; a visit needs a heavy fence.
pub struct OwnerCell<T> {
    inside: AtomicBool,
    visited: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the protocol gives the value to one thread at a time, by a Release/Acquire pair.
unsafe impl<T: Send> Sync for OwnerCell<T> {}
// SAFETY: the cell owns its value.
unsafe impl<T: Send> Send for OwnerCell<T> {}

/// Outcome of visits to many cells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Visits {
    /// All cells were visited.
    All,
    /// Some cells were skipped: their owners or other visitors were inside.
    Some,
    /// Some cells were skipped: the kernel denied this thread the fence that a visit needs.
    Refused,
}

impl<T> OwnerCell<T> {
    /// Creates a cell with no thread inside.
    pub fn new(value: T) -> Self {
        Self {
            inside: AtomicBool::new(false),
            visited: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `f` on the value. `None`: a visitor has it, or the owner is already inside.
    ///
    /// # Safety
    /// Only the owner calls this. Calls never overlap, and each happens after the previous one.
    #[inline]
    pub unsafe fn enter<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        // Relaxed: only the owner writes this field.
        if self.inside.load(Relaxed) {
            return None;
        }
        self.inside.store(true, Relaxed);
        // Pairs with the heavy fence in `visit`: at least one side sees the other.
        light_fence();
        let leave = Leave(&self.inside);
        // Acquire: pairs with the Release in `visit`, so that the owner sees a visitor's changes.
        if self.visited.load(Acquire) {
            return None;
        }
        // SAFETY: `inside` is set and no visitor is active; a later one sees `inside`.
        let result = self.value.with_mut(|value| f(unsafe { &mut *value }));
        drop(leave);
        Some(result)
    }

    /// Runs `f` on the value from any thread. `None`: the owner or another visitor is inside.
    pub fn visit<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        let leave = self.knock()?;
        // Pairs with the light fence in `enter`. If the kernel denies the fence, the owner's state
        // is unknown. SAFETY: the fence follows the knock.
        if heavy_fence() { unsafe { self.open(leave, f) } } else { None }
    }

    /// Visits many cells. Each group of cells needs a heavy fence, which interrupts every
    /// processor.
    pub fn visit_all<'a, H: 'a>(
        holders: impl IntoIterator<Item = &'a H>,
        cell: impl Fn(&'a H) -> &'a Self,
        mut f: impl FnMut(&'a H, &mut T),
    ) -> Visits
    where
        T: 'a,
    {
        let (mut holders, mut visits) = (holders.into_iter().fuse().peekable(), Visits::All);
        while holders.peek().is_some() {
            // The owners cannot enter meanwhile: the size of a group is limited.
            let group = holders.by_ref().take(AT_ONCE);
            let knocked: SmallVec<[_; AT_ONCE]> =
                group.map(|holder| (holder, cell(holder).knock())).collect();
            if !heavy_fence() {
                visits = Visits::Refused;
                continue;
            }
            for (holder, leave) in knocked {
                let visited = leave.and_then(|leave| {
                    // SAFETY: the fence follows the knock.
                    unsafe { cell(holder).open(leave, |value| f(holder, value)) }
                });
                if visited.is_none() && visits == Visits::All {
                    visits = Visits::Some;
                }
            }
        }
        visits
    }

    fn knock(&self) -> Option<Leave<'_>> {
        // Acquire: pairs with the Release of the previous visitor.
        self.visited.compare_exchange(false, true, Acquire, Relaxed).ok()?;
        Some(Leave(&self.visited))
    }

    /// Runs `f` on the value, unless the owner is inside.
    ///
    /// # Safety
    /// `leave` comes from a knock at this cell, followed by a heavy fence.
    unsafe fn open<R>(&self, leave: Leave<'_>, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        // Acquire: pairs with the Release of the leaving owner.
        if self.inside.load(Acquire) {
            return None;
        }
        // SAFETY: this thread set `visited` and the owner is outside; on entry it sees `visited`.
        let result = self.value.with_mut(|value| f(unsafe { &mut *value }));
        drop(leave);
        Some(result)
    }
}

struct Leave<'a>(&'a AtomicBool);

impl Drop for Leave<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next owner or visitor.
        self.0.store(false, Release);
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_nested_entry_and_a_visit_from_inside_turn_back() {
        let cell = OwnerCell::new(1);
        // SAFETY: one thread.
        let outer = unsafe {
            cell.enter(|value| {
                *value += 1;
                (cell.enter(|_| ()), cell.visit(|_| ()))
            })
        };
        assert_eq!(outer, Some((None, None)));
        assert_eq!(cell.visit(|value| *value), Some(2));
    }

    #[test]
    fn visit_all_skips_cells_with_the_owner_inside() {
        let cells: Vec<_> = (0..2 * AT_ONCE + 3).map(OwnerCell::new).collect();
        let mut seen = Vec::new();
        assert_eq!(OwnerCell::visit_all(&cells, |cell| cell, |_, value| seen.push(*value)), Visits::All);
        assert_eq!(seen, (0..cells.len()).collect::<Vec<_>>());
        seen.clear();
        // SAFETY: one thread.
        let inside = unsafe {
            cells[3].enter(|_| OwnerCell::visit_all(&cells, |cell| cell, |_, value| seen.push(*value)))
        };
        assert_eq!((inside, seen.len()), (Some(Visits::Some), cells.len() - 1));
        assert!(!seen.contains(&3));
        assert!(cells.iter().all(|cell| cell.visit(|_| ()).is_some()), "all cells are open again");
    }

    #[test]
    fn the_owner_turns_back_from_a_visited_cell() {
        let cell = OwnerCell::new(1);
        // SAFETY: one thread.
        let met = cell.visit(|_| unsafe { cell.enter(|_| ()) });
        assert_eq!(met, Some(None));
    }

    #[test]
    fn a_panic_inside_opens_the_cell_again() {
        let cell = OwnerCell::new(1);
        // SAFETY: one thread.
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| unsafe {
            cell.enter(|_| panic!("inside"))
        }));
        assert!(caught.is_err());
        assert_eq!(cell.visit(|value| *value), Some(1));
    }

    #[test]
    fn one_thread_at_a_time() {
        const ROUNDS: u64 = if cfg!(miri) { 200 } else { 200_000 };
        // Two halves that are equal unless two threads are inside.
        let cell = OwnerCell::new((0u64, 0u64));
        let (entered, visited) = std::thread::scope(|scope| {
            let visitor = scope.spawn(|| {
                let bump = |v: &mut (u64, u64)| {
                    assert_eq!(v.0, v.1);
                    v.0 += 1;
                    v.1 += 1;
                };
                (0..ROUNDS / 100).filter(|_| cell.visit(bump).is_some()).count()
            });
            let mut entered = 0;
            for _ in 0..ROUNDS {
                // SAFETY: only this thread enters.
                let got = unsafe {
                    cell.enter(|v| {
                        assert_eq!(v.0, v.1);
                        v.0 += 1;
                        v.1 += 1;
                    })
                };
                entered += got.is_some() as u64;
            }
            (entered, visitor.join().unwrap() as u64)
        });
        assert_eq!(cell.visit(|v| v.0), Some(entered + visited));
    }
}
