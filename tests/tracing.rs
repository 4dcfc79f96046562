//! Compactions, resizes, transfers and waits are spans.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Pool, SequenceId};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Records the names of the spans that were entered.
#[derive(Default)]
struct Names {
    created: Mutex<Vec<&'static str>>,
    entered: Mutex<BTreeSet<&'static str>>,
    next: AtomicU64,
}

struct Recorder(&'static Names);

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "kvpool"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.0.created.lock().unwrap().push(span.metadata().name());
        Id::from_u64(self.0.next.fetch_add(1, Relaxed) + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, span: &Id) {
        let name = self.0.created.lock().unwrap()[span.into_u64() as usize - 1];
        self.0.entered.lock().unwrap().insert(name);
    }

    fn exit(&self, _: &Id) {}
}

fn pool() -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(100).build().unwrap()
}

#[tokio::test]
async fn each_operation_is_a_span() {
    let names: &'static Names = Box::leak(Box::default());
    let _recording = tracing::subscriber::set_default(Recorder(names));
    let entered = || std::mem::take(&mut *names.entered.lock().unwrap());
    let (here, there) = (pool(), pool());

    here.defragment().await.unwrap();
    assert_eq!(entered(), ["kvpool.defragment"].into());
    here.resize(90).await.unwrap();
    here.resize(100).await.unwrap();
    assert_eq!(entered(), ["kvpool.resize"].into());

    let mut sequence = here.sequence(SequenceId(1)).open().unwrap();
    let mut batch = here.begin_batch();
    batch.append(&mut sequence, 9).unwrap();
    batch.finish();
    let (copy, _) = here.replicate(&sequence, &there).await.unwrap();
    assert_eq!(entered(), ["kvpool.replicate"].into());
    drop(copy);
    drop(here.migrate(sequence, &there).await.unwrap());
    assert_eq!(entered(), ["kvpool.migrate"].into());

    let all = here.allocate_owned(AllocRequest::new(100)).unwrap();
    let (lease, ()) = tokio::join!(here.allocate_async(AllocRequest::new(1)), async { drop(all) });
    assert_eq!(entered(), ["kvpool.wait"].into());
    drop((lease, here.allocate_async(AllocRequest::new(1)).await.unwrap()));
    assert_eq!(entered(), [].into(), "a request that need not wait is no wait");
}
