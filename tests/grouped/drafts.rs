//! Drafts in groups with states and bytes: a swap between their acceptance and the next append.

use kvpool::{Preempt, ResumeOptions};

use super::moving::{STATES, append, check, compute, is_idle, pool, tokens};
use super::*;

/// The states of a swapped sequence are behind the tokens that they hold, and the next append steps
/// them over those accepted before the swap.
#[test]
fn states_behind_accepted_drafts_are_swapped() {
    for (drafts, accepted) in [(4, 4), (4, 2), (3, 0), (9, 9)] {
        let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(120));
        let mut sequence = compute(&near, 1, &all[..50]);
        let mut batch = near.begin_batch();
        super::append(&mut batch, &mut sequence, &all, Tokens::Draft(drafts)).unwrap();
        batch.finish();
        sequence.accept(&all[50..50 + accepted]).unwrap();
        let gone = block_on(near.preempt(sequence, Preempt::Swap(&far))).unwrap();
        let away = gone.swapped.unwrap();
        assert_eq!((away.sequence.len(), away.sequence.state_tokens()), (50 + accepted, 50));
        check(&far, &away.sequence, &all);
        let (mut back, _) = block_on(near.resume(&away.sequence, ResumeOptions::new())).unwrap();
        drop(away);
        assert_eq!((back.len(), back.state_tokens()), (50 + accepted, 50));
        check(&near, &back, &all);
        append(&near, &mut back, &all, 10);
        assert_eq!((back.len(), back.state_tokens()), (60 + accepted, 60 + accepted));
        check(&near, &back, &all);
        drop(back);
        [near, far].iter().for_each(is_idle);
    }
}
