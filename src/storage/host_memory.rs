//! Available memory of the host.
//!
//! | limit | source |
//! |---|---|
//! | the system's | `MemAvailable` of `/proc/meminfo` |
//! | the container's | control groups, version 2: `memory.max - (memory.current - inactive_file)`, in the process's group and all above |
//!
//! `RLIMIT_MEMLOCK` is not considered: a driver locks pages in the kernel, which may or may not
//! count them, and denies the lock if they exceed the limit.

use std::fs;
use std::path::Path;

/// Returns the host memory in bytes that the system and the container (control groups version 2)
/// leave to this process without swapping. `None` if unknown.
pub fn host_free_bytes() -> Option<u64> {
    free_bytes(&|path| fs::read_to_string(path).ok())
}

/// Implements [`host_free_bytes`] over a function that reads files.
fn free_bytes(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let system = available(&read(Path::new("/proc/meminfo"))?)?;
    Some(group_free_bytes(read).map_or(system, |group| group.min(system)))
}

/// Parses `MemAvailable` from `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the least memory that a control group of this process leaves; `None` without a limit.
fn group_free_bytes(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group = Path::new("/sys/fs/cgroup").join(group);
    // In a container the root of the tree is the container's own group, and has a limit.
    let above = group.ancestors().take_while(|folder| folder.starts_with("/sys/fs/cgroup"));
    above.filter_map(|folder| left_in(folder, read)).min()
}

fn left_in(folder: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
    // `max` if there is no limit.
    let (max, current) = (number("memory.max")?, number("memory.current")?);
    // File pages are reclaimed before the limit is enforced.
    let stat = read(&folder.join("memory.stat")).unwrap_or_default();
    let files = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok());
    Some(max.saturating_sub(current.saturating_sub(files.unwrap_or(0))))
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
}
