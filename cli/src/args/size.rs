/// Units, the largest first.
const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// Parses a size such as `40GiB`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let (number, log2) = UNITS
        .iter()
        .find_map(|&(unit, log2)| Some((text.strip_suffix(unit)?, log2)))
        .unwrap_or((text.strip_suffix('B').unwrap_or(text), 0));
    let whole = number.trim().parse().ok().and_then(|number: u64| number.checked_mul(1 << log2));
    whole.ok_or_else(|| "not a whole number of bytes, KiB, MiB, GiB or TiB, such as 40GiB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit() {
        for (text, size) in [("0", 0), ("7B", 7), ("3 KiB", 3 << 10), ("40GiB", 40 << 30), ("1TiB", 1 << 40)]
        {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for text in ["", "GiB", "1.5GiB", "-1", "1GB", "99999999999TiB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
