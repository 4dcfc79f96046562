//! The host's memory: how much of it is available, and which pages of this process have some.
//!
//! | limit | source |
//! |---|---|
//! | the system's | `MemAvailable` of `/proc/meminfo` |
//! | the container's | control groups, version 2: `memory.max - (memory.current - inactive_file)`, in the process's group and all above |
//!
//! `RLIMIT_MEMLOCK` is none of them: a driver that locks pages does so in the kernel, where it may
//! count them or not. One that counts them refuses.

use std::fs;
use std::path::Path;

/// Returns the host memory in bytes that is available to this process without swapping: what its
/// system and its container (control groups of version 2) leave. `None` if unknown.
pub fn host_free_bytes() -> Option<u64> {
    free_bytes(&|path| fs::read_to_string(path).ok())
}

/// Does so by files that `read` reads.
fn free_bytes(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let system = available(&read(Path::new("/proc/meminfo"))?)?;
    Some(group_free_bytes(read).map_or(system, |group| group.min(system)))
}

/// Returns `MemAvailable` from the text of `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns what the control groups of this process leave; `None` if no group has a limit.
fn group_free_bytes(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group = Path::new("/sys/fs/cgroup").join(group);
    // In a container the root of the tree is the container's own group, and has a limit.
    let above = group.ancestors().take_while(|folder| folder.starts_with("/sys/fs/cgroup"));
    above.filter_map(|folder| left_in(folder, read)).min()
}

/// Returns what a control group leaves; `None` if it has no limit.
fn left_in(folder: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
    // `max` if there is no limit.
    let (max, current) = (number("memory.max")?, number("memory.current")?);
    // Pages of files are given back before the limit is enforced.
    let stat = read(&folder.join("memory.stat")).unwrap_or_default();
    let files = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok());
    Some(max.saturating_sub(current.saturating_sub(files.unwrap_or(0))))
}

/// Returns the number of bytes of these page-aligned ranges that have physical memory; 0 if unknown.
#[cfg(all(feature = "cuda", not(kvpool_loom)))]
pub(crate) fn resident_bytes(ranges: &[std::ops::Range<usize>]) -> usize {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        /// Pages of one question.
        const PAGES: usize = 1 << 16;
        let page = super::memory::page_size();
        let mut states = vec![0u8; PAGES];
        let mut resident = 0;
        for range in ranges {
            for start in range.clone().step_by(PAGES * page) {
                let bytes = (range.end - start).min(PAGES * page);
                let at = std::ptr::with_exposed_provenance_mut(start);
                // SAFETY: the call only looks up the pages; the list has a place for each.
                if unsafe { libc::mincore(at, bytes, states.as_mut_ptr()) } == 0 {
                    let states = &states[..bytes.div_ceil(page)];
                    resident += states.iter().filter(|&&state| state & 1 != 0).count() * page;
                }
            }
        }
        resident
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    {
        let _ = ranges;
        0
    }
}

/// Sets whether child processes get the pages of a page-aligned range when this process forks. Returns
/// false if the system refuses.
///
/// After a fork, the process that writes a shared page first gets a copy: the pages that a device
/// accesses would be the child's.
#[cfg(all(feature = "cuda", not(kvpool_loom)))]
pub(crate) fn set_inherited(range: &std::ops::Range<usize>, is_inherited: bool) -> bool {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        let advice = if is_inherited { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        let at = std::ptr::with_exposed_provenance_mut(range.start);
        // SAFETY: changes nothing in this process.
        unsafe { libc::madvise(at, range.len(), advice) == 0 }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    {
        let _ = (range, is_inherited);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   24291408 kB\n"), Some(24_291_408 * 1024));
        for text in ["", "MemAvailable: x kB", "MemAvailable: 1", "MemAvailable: 99999999999999999999 kB"] {
            assert_eq!(available(text), None, "{text:?}");
        }
    }

    /// Files by path, under the root of the control groups if the path is relative.
    fn free(files: &[(&str, &str)]) -> Option<u64> {
        free_bytes(&|path| {
            let is_it = |name: &str| Path::new("/sys/fs/cgroup").join(name) == path;
            files.iter().find(|(name, _)| is_it(name)).map(|(_, text)| (*text).to_owned())
        })
    }

    #[test]
    fn the_tightest_limit_counts() {
        const SYSTEM: (&str, &str) = ("/proc/meminfo", "MemAvailable: 1000 kB");
        const GROUP: (&str, &str) = ("/proc/self/cgroup", "1:cpu:/x\n0::/pod/engine\n");
        assert_eq!(free(&[]), None);
        assert_eq!(free(&[SYSTEM]), Some(1_024_000));
        assert_eq!(free(&[SYSTEM, GROUP]), Some(1_024_000));
        let unlimited = [("pod/engine/memory.max", "max\n"), ("pod/engine/memory.current", "70000\n")];
        let of =
            |more: &[(&'static str, &'static str)]| free(&[&[SYSTEM, GROUP], &unlimited[..], more].concat());
        assert_eq!(of(&[]), Some(1_024_000));
        let pod = [("pod/memory.max", "100000\n"), ("pod/memory.current", "80000\n")];
        assert_eq!(of(&pod), Some(20_000));
        let stat = ("pod/memory.stat", "anon 7\ninactive_file 30000\nactive_file 5\n");
        assert_eq!(of(&[pod[0], pod[1], stat]), Some(50_000));
        // The container's own group, as the root.
        let root = [("memory.max", "1000"), ("memory.current", "2000")];
        assert_eq!(of(&[pod[0], pod[1], root[0], root[1]]), Some(0));
        let wide = [("memory.max", "99999999"), ("memory.current", "0")];
        assert_eq!(of(&wide), Some(1_024_000));
    }

    #[test]
    #[cfg(all(feature = "cuda", not(kvpool_loom), target_os = "linux", not(miri)))]
    fn pages_have_memory_once_they_were_written() {
        use crate::storage::memory::Reservation;

        let memory = Reservation::new(512 << 10).unwrap();
        let base = memory.base().expose_provenance();
        let page = crate::storage::memory::page_size();
        let ranges = [memory.pages_of(base..base + (512 << 10))];
        let before = resident_bytes(&ranges);
        // SAFETY: memory of this reservation.
        unsafe { memory.base().add(5 * page).write(1) };
        assert!(before < 512 << 10 && resident_bytes(&ranges) > before);
        assert!(set_inherited(&ranges[0], false) && set_inherited(&ranges[0], true));
    }
}
