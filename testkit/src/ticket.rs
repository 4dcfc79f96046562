//! A batch reduced to its ticket, for tests of the floors below sequences.

use kvpool::batch::InFlight;
use kvpool::pool::Pool;

/// In flight until it is dropped, also by a panic.
#[derive(Debug)]
pub struct BareBatch {
    pool: Pool,
    in_flight: Option<InFlight>,
}

impl BareBatch {
    /// Takes a ticket.
    pub fn begin(pool: &Pool) -> Self {
        Self { pool: pool.clone(), in_flight: Some(pool.blocks().clock().begin()) }
    }

    /// Gives it back.
    pub fn finish(self) {}
}

impl Drop for BareBatch {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            self.pool.blocks().clock().end(in_flight);
        }
    }
}
