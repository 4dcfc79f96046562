//! Theorem: the owner of a cell and any number of visitors are never inside together, each sees the
//! previous one's writes, no thread waits for another, and a section that panics leaves the cell
//! open. (The cell's own value is loom's `UnsafeCell`: two threads inside, or one that does not see
//! the last one's writes, are reported.)
#![cfg(kvpool_loom)]

use kvpool::frame::{OwnerCell, Visits};
use kvpool::testing::catch;
use kvpool_loom_tests::check_to;
use loom::sync::Arc;
use loom::thread;

type Cell = Arc<OwnerCell<u32>>;

fn visiting(cell: &Cell, times: u32) -> thread::JoinHandle<u32> {
    let cell = cell.clone();
    thread::spawn(move || (0..times).filter_map(|_| cell.visit(|value| *value += 1)).count() as u32)
}

fn entering(cell: &Cell, times: u32) -> u32 {
    // SAFETY: only one thread of each model enters.
    (0..times).filter_map(|_| unsafe { cell.enter(|value| *value += 1) }).count() as u32
}

#[test]
fn owner_and_visitor() {
    check_to(4, "owner_cell::owner_and_visitor", || {
        let cell = Arc::new(OwnerCell::new(0));
        let visitor = visiting(&cell, 2);
        let entered = entering(&cell, 2);
        let visited = visitor.join().unwrap();
        assert_eq!(cell.visit(|value| *value), Some(entered + visited), "a section's effect was lost");
    });
}

#[test]
fn owner_and_two_visitors() {
    check_to(4, "owner_cell::owner_and_two_visitors", || {
        let cell = Arc::new(OwnerCell::new(0));
        let visitors = [visiting(&cell, 1), visiting(&cell, 1)];
        let entered = entering(&cell, 2);
        let visited: u32 = visitors.into_iter().map(|visitor| visitor.join().unwrap()).sum();
        assert_eq!(cell.visit(|value| *value), Some(entered + visited), "a section's effect was lost");
    });
}

/// A visitor of two cells issues one fence for both, while the owner of each cell in turn is
/// inside.
#[test]
fn two_cells_for_one_fence() {
    check_to(4, "owner_cell::two_cells_for_one_fence", || {
        let cells = [Arc::new(OwnerCell::new(0)), Arc::new(OwnerCell::new(0))];
        let others = cells.clone();
        let visitor = thread::spawn(move || {
            let mut visited = 0;
            let visits = OwnerCell::visit_all(
                &others,
                |cell| cell,
                |_, value| {
                    *value += 1;
                    visited += 1;
                },
            );
            assert_eq!(visits == Visits::All, visited == 2);
            visited
        });
        let entered = entering(&cells[1], 1) + entering(&cells[0], 1) + entering(&cells[1], 1);
        let visited = visitor.join().unwrap();
        let values = cells.map(|cell| cell.visit(|value| *value).expect("both cells are open again"));
        assert_eq!(values[0] + values[1], entered + visited, "a section's effect was lost");
    });
}

/// Both sides panic in their sections; both flags are clear at the end.
#[test]
fn panics() {
    check_to(4, "owner_cell::panics", || {
        let cell = Arc::new(OwnerCell::new(0));
        let other = cell.clone();
        // `resume_unwind`: a panic without the hook's message.
        let bang = |value: &mut u32| -> u32 {
            *value += 1;
            std::panic::resume_unwind(Box::new(()))
        };
        let visitor = thread::spawn(move || {
            // Left the section by a panic, or turned back.
            catch(|| other.visit(bang)).is_err() as u32
        });
        // SAFETY: one thread enters.
        let entered = catch(|| unsafe { cell.enter(bang) }).is_err() as u32;
        let visited = visitor.join().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { cell.enter(|value| *value) }, Some(entered + visited));
        assert_eq!(cell.visit(|value| *value), Some(entered + visited));
    });
}

/// The cell changes owners, as a thread cache does when its thread ends and a new one takes it
/// over.
#[test]
fn owners_in_turn() {
    check_to(4, "owner_cell::owners_in_turn", || {
        let cell = Arc::new(OwnerCell::new(0));
        let visitor = visiting(&cell, 1);
        let other = cell.clone();
        let before = thread::spawn(move || entering(&other, 1)).join().unwrap();
        let after = entering(&cell, 1);
        let visited = visitor.join().unwrap();
        assert_eq!(cell.visit(|value| *value), Some(before + after + visited));
    });
}
