//! Amounts and counts in words.

use std::fmt::Display;

pub(crate) use rannc_cost::counted;
use rannc_plan::{Sharding, StagePlan};

/// A share, 0 to 1, in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A change as a share, in percent with its sign, if that is not of a zero.
pub(crate) fn signed_percent(share: f64) -> String {
    let text = format!("{:+.1}%", 100.0 * share);
    if matches!(text.as_str(), "+0.0%" | "-0.0%") { "0.0%".to_owned() } else { text }
}

/// A paragraph at most `width` columns wide, its last line ended; further lines are indented.
pub fn paragraph(text: &str, width: usize) -> String {
    let options = textwrap::Options::new(width).subsequent_indent("  ").break_words(false);
    let options = options.word_splitter(textwrap::WordSplitter::NoHyphenation);
    textwrap::fill(text, options) + "\n"
}

/// A large number with a decimal prefix: `12.3 G`.
pub(crate) fn decimal(amount: f64) -> String {
    const PREFIXES: [&str; 7] = ["", " k", " M", " G", " T", " P", " E"];
    let mut amount = amount;
    let mut prefix = 0;
    while amount >= 1000.0 && prefix + 1 < PREFIXES.len() {
        amount /= 1000.0;
        prefix += 1;
    }
    let digits = format!("{amount:.1}");
    format!("{}{}", digits.strip_suffix(".0").filter(|_| prefix == 0).unwrap_or(&digits), PREFIXES[prefix])
}

/// What a Stage does to save memory: `recompute, ZeRO 1, offload`; empty if nothing.
pub(crate) fn savers(stage: &StagePlan) -> String {
    let recompute = match stage.blocks_again() {
        _ if stage.recomputes_all() => Some("recompute".to_owned()),
        0 => None,
        count => Some(format!("recompute {}", counted(count as u64, "block", "blocks"))),
    };
    let offload = stage.offload.then_some("offload");
    let all = [recompute, sharding(stage.sharding), offload.map(str::to_owned)];
    all.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// `ZeRO 1`, or `ZeRO 3 kept`; nothing where Replicas divide nothing.
pub(crate) fn sharding(sharding: Sharding) -> Option<String> {
    (sharding > Sharding::None).then(|| format!("ZeRO {}", zero(sharding)))
}

/// A level by its number: `1`, or `3 kept`.
pub(crate) fn zero(sharding: Sharding) -> String {
    let kept = if sharding == Sharding::KeptParams { " kept" } else { "" };
    format!("{}{kept}", sharding.zero_level())
}

/// Increasing numbers with their runs shortened: `0-3, 6`.
pub(crate) fn runs(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|left, right| left.checked_add(1) == Some(*right));
    let texts = runs.filter_map(|run| match run {
        [] => None,
        [only] => Some(only.to_string()),
        [first, .., last] => Some(format!("{first}-{last}")),
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// Most amounts that are listed one by one.
const MOST_LISTED: usize = 6;

/// `1 + 1 + 2`; of many amounts equal neighbours counted: `12 x 1, 2 x 4`.
pub(crate) fn each<T: Display + PartialEq>(amounts: &[T]) -> String {
    if amounts.len() > MOST_LISTED {
        return repeats(amounts);
    }
    amounts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" + ")
}

/// Equal neighbours counted: `3 x 8, 7`.
pub(crate) fn repeats<T: Display + PartialEq>(amounts: &[T]) -> String {
    let texts = amounts.chunk_by(T::eq).filter_map(|run| match run {
        [] => None,
        [only] => Some(only.to_string()),
        [first, ..] => Some(format!("{} x {first}", run.len())),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_short() {
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(runs(&[]), "");
        assert_eq!(repeats(&[8, 8, 8, 7]), "3 x 8, 7");
    }

    #[test]
    fn no_change_has_no_sign() {
        let texts = [-0.000_4, 0.000_4, 0.0, -0.001, 0.25].map(signed_percent);
        assert_eq!(texts, ["0.0%", "0.0%", "0.0%", "-0.1%", "+25.0%"]);
    }

    #[test]
    fn paragraphs_break_between_words() {
        assert_eq!(paragraph("one two-three four", 9), "one\n  two-three\n  four\n");
    }

    #[test]
    fn large_numbers_have_prefixes() {
        assert_eq!(decimal(999.0), "999");
        assert_eq!(decimal(40.123), "40.1");
        assert_eq!(decimal(12_345.0), "12.3 k");
        assert_eq!(decimal(2.5e21), "2500.0 E");
    }
}
