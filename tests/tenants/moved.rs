//! Tenants of sequences that are swapped out, or go to another pool.

use kvpool::{Preempt, ResumeOptions, TransferError};
use pollster::block_on;

use super::*;

fn refusal(error: TransferError) -> SequenceError {
    match error {
        TransferError::Sequence(error) => error,
        TransferError::Alloc(error) => error.into(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_swapped_sequence_counts_again_when_it_resumes() {
    let here = pool(100, &[(A, limits(20, 0)), (B, limits(None, 0))]);
    let host = builder(100, PrefixConfig::new()).build().unwrap();
    let running = open(&here, 1, 10, A);
    let swapped = block_on(here.preempt(running, Preempt::Swap(&host))).unwrap().swapped.unwrap().sequence;
    assert_eq!((swapped.tenant(), host.tenants().len()), (Some(A), 0), "a name, in a pool without tenants");
    drop(evict(&here, 10).unwrap());
    assert_eq!(holds(&here, A), (0, 0));
    let other = open(&here, 2, 10, A);
    let resume = || block_on(here.resume(&swapped, ResumeOptions::new()).into_future());
    let refused = AllocError::OverQuota { asked: 11, tenant: A, quota: 20, held: 11 };
    assert_eq!(refusal(resume().unwrap_err()), refused.into());
    drop(other);
    let (mut resumed, _) = resume().unwrap();
    assert_eq!((resumed.tenant(), holds(&here, A)), (Some(A), (20, 9)), "its own made room");
    let mut batch = here.begin_batch();
    assert!(batch.append(&mut resumed, Tokens::Draft(40 * BLOCK_TOKENS)).is_err(), "appends count, too");
    batch.finish();
    drop((swapped, resumed));
    here.audit().unwrap();
}

#[test]
fn a_pool_takes_sequences_of_its_own_tenants() {
    let from = pool(50, &[(A, limits(None, 0))]);
    let to = pool(50, &[(B, limits(None, 0))]);
    let sequence = open(&from, 1, 10, A);
    let unknown = SequenceError::Tenant(TenantError::Unknown { tenant: A });
    assert_eq!(refusal(block_on(from.replicate(&sequence, &to)).unwrap_err()), unknown);
    let failed = block_on(from.migrate(sequence, &to)).unwrap_err();
    assert_eq!(refusal(failed.error), unknown);
    let sequence = *failed.sequence;
    assert_eq!(
        (sequence.tenant(), holds(&from, A), to.view(SequenceId(1)).is_none()),
        (Some(A), (11, 0), true)
    );
    to.set_tenant(A, limits(10, 0)).unwrap();
    let over = AllocError::OverQuota { asked: 11, tenant: A, quota: 10, held: 0 };
    assert_eq!(refusal(block_on(from.replicate(&sequence, &to)).unwrap_err()), over.into());
    to.set_tenant(A, limits(11, 0)).unwrap();
    // The halves, as between processes, with a manifest.
    let export = from.export(sequence).map_err(|failed| failed.error).unwrap();
    let import = to.import(&export.manifest().unwrap()).unwrap();
    assert_eq!((holds(&from, A), holds(&to, A)), ((11, 0), (11, 0)));
    drop((import, export));
    assert_eq!(holds(&to, A), (0, 0));
    let sequence = open(&from, 2, 10, A);
    let (moved, _) = block_on(from.migrate(sequence, &to)).unwrap();
    let fork = moved.fork(SequenceId(9)).unwrap();
    assert_eq!((fork.tenant(), holds(&from, A).1, holds(&to, A)), (Some(A), 20, (11, 0)));
    drop((moved, fork));
    [from, to].iter().for_each(|pool| drop(pool.audit().unwrap()));
}
