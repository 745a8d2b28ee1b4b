//! Amounts as a person reads them.

pub(crate) const GIB: f64 = (1_u64 << 30) as f64;
pub(crate) const GIGA: f64 = 1e9;
pub(crate) const TERA: f64 = 1e12;

/// Bytes in the largest binary unit that leaves at least one.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut amount = bytes as f64;
    let mut unit = 0;
    while amount >= 1024.0 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{amount:.2} {}", UNITS[unit]) }
}

/// A time in microseconds, milliseconds or seconds.
pub fn format_us(us: f64) -> String {
    if us < 1e3 {
        format!("{us:.1} us")
    } else if us < 1e6 {
        format!("{:.2} ms", us / 1e3)
    } else {
        format!("{:.2} s", us / 1e6)
    }
}

/// `1 stage`, `2 stages`.
pub fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_fit_the_amount() {
        assert_eq!(format_bytes(1023), "1023 B");
        assert_eq!(format_bytes(3 << 29), "1.50 GiB");
        assert_eq!(format_bytes(u64::MAX), "16777216.00 TiB");
        assert_eq!(format_us(0.0), "0.0 us");
        assert_eq!(format_us(12_345.0), "12.35 ms");
        assert_eq!(format_us(2e6), "2.00 s");
    }
}
