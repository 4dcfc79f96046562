//! A thread to which the system refuses the heavy fence: a seccomp filter applies to it alone,
//! after the process settled on `membarrier`. The thread allocates the frames within its reach,
//! gets an error that names the reason for a refusal, and does not spin. Other threads are not
//! affected.
#![cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(any(kvpool_loom, miri))
))]

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kvpool::storage::KvLayout;
use kvpool::{AllocError, AllocRequest, AuditError, Pool, ResizeError, ResizeOptions};

const BLOCKS: usize = 64;

fn pool() -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout).blocks(BLOCKS).without_null_block().magazine_blocks(8).threads(2).build().unwrap()
}

/// Returns whether this process has the call: otherwise all threads fence, and none can be refused.
fn has_membarrier() -> bool {
    // SAFETY: the call takes integers only.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_QUERY, 0, 0) };
    commands > 0 && commands & i64::from(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0
}

/// Makes the current thread's `membarrier` fail with EPERM from now on.
fn refuse_membarrier() {
    let instruction = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        // The system call's number, which is the first field.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_membarrier as u32, 0, 1),
        instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls are about this thread; the program is valid, and copied by the kernel.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let rc = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        let rc = libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
        assert_eq!(rc, -1, "the filter is in force");
    }
}

/// Runs `f` on a filtered thread, beside an idle one with free blocks in its cache; afterwards a
/// third thread allocates everything.
fn beside_a_cache(f: impl FnOnce(&Pool) + Send) {
    if !has_membarrier() {
        eprintln!("this system has no membarrier");
        return;
    }
    let pool = &pool();
    let (cached, is_cached) = mpsc::channel();
    let (done, is_done) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..4 {
                drop(pool.allocate(AllocRequest::new(8)).unwrap());
            }
            cached.send(()).unwrap();
            is_done.recv().unwrap_err();
        });
        is_cached.recv().unwrap();
        assert!(pool.stats().in_magazines > 0);
        let filtered = scope.spawn(move || {
            refuse_membarrier();
            f(pool);
        });
        let outcome = filtered.join();
        assert_eq!(pool.stats().waiting, 0);
        let all = pool.allocate(AllocRequest::new(BLOCKS)).map(drop);
        drop(done);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        all.expect("another thread reclaims everything");
    });
}

fn soon<T>(future: impl IntoFuture<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let bounded = async { tokio::time::timeout(Duration::from_secs(20), future).await };
    runtime.block_on(bounded).expect("it spins, or sleeps forever")
}

#[test]
fn a_request_names_the_reason_of_its_refusal() {
    beside_a_cache(|pool| {
        let refused = pool.allocate(AllocRequest::new(BLOCKS)).unwrap_err();
        assert_eq!(refused, AllocError::FenceRefused { asked: BLOCKS, free: BLOCKS });
        assert!(refused.to_string().contains("membarrier"), "{refused}");
        // Frames within reach are allocated.
        let reach = BLOCKS - pool.stats().in_magazines;
        let some = pool.allocate(AllocRequest::new(reach)).unwrap();
        let refused = pool.allocate(AllocRequest::new(1)).unwrap_err();
        assert!(matches!(refused, AllocError::FenceRefused { asked: 1, free: 1.. }), "{refused:?}");
        drop(some);
        drop(pool.allocate(AllocRequest::new(1)).unwrap());
        // A request for more than is free is refused for that reason.
        let held = pool.allocate(AllocRequest::new(8)).unwrap();
        let refused = pool.allocate(AllocRequest::new(BLOCKS)).unwrap_err();
        assert!(matches!(refused, AllocError::Exhausted { .. }), "{refused:?}");
        drop(held);
    });
}

#[test]
fn a_request_that_waits_is_refused() {
    beside_a_cache(|pool| {
        // It could be met, by frames out of reach.
        let refused = soon(pool.allocate_async(AllocRequest::new(BLOCKS))).unwrap_err();
        assert!(matches!(refused, AllocError::FenceRefused { asked: BLOCKS, .. }), "{refused:?}");
        // In line behind another request, which asks for more than there is.
        let held = pool.allocate_owned(AllocRequest::new(8)).unwrap();
        let refused = soon(async {
            let (first, second) = tokio::join!(
                pool.allocate_async(AllocRequest::new(BLOCKS)),
                pool.allocate_async(AllocRequest::new(BLOCKS - 1))
            );
            [first.unwrap_err(), second.unwrap_err()]
        });
        let is_refused = |error: &AllocError| matches!(error, AllocError::FenceRefused { .. });
        assert!(refused.iter().all(is_refused), "{refused:?}");
        assert_eq!(pool.stats().waiting, 0);
        drop(held);
        // A request that need not wait is met.
        drop(soon(pool.allocate_async(AllocRequest::new(8))).unwrap());
    });
}

#[test]
fn counts_need_no_fence() {
    beside_a_cache(|pool| {
        pool.trim();
        assert_eq!(pool.free_blocks(), BLOCKS);
        assert_eq!(pool.stats().free, BLOCKS);
        assert_eq!(pool.audit(), Err(AuditError::FenceRefused));
        soon(pool.defragment()).unwrap();
        // A shrink cannot collect frames that other threads cache beyond the end, and reports that
        // in time.
        let options = ResizeOptions::new().patience(Duration::from_millis(20));
        match soon(pool.resize_with(2, options)) {
            Err(ResizeError::Blocked { blocks, retired, .. }) => {
                assert!(blocks.is_empty() && retired > 0, "{blocks:?}, {retired}");
            }
            outcome => panic!("{outcome:?}"),
        }
        assert_eq!(pool.total_blocks(), BLOCKS);
    });
}
