//! Damaged files: what is left of a text after editors, disks and curious people have been at it.

use std::ops::Range;

use proptest::prelude::*;
use proptest::test_runner::Config;

/// Values that readers meet seldom.
const ODD: [&str; 22] = [
    "",
    "0",
    "-1",
    "1",
    "7",
    "1e400",
    "-0.0",
    "1e-320",
    "nan",
    "inf",
    "4294967296",
    "18446744073709551615",
    "-9223372036854775808",
    "99999999999999999999999",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[",
    "\u{0}",
    "\u{fffd}\n",
];

#[derive(Clone, Debug)]
enum Damage {
    /// Another byte.
    Byte(usize, u8),
    /// A run of bytes is lost.
    Lost(usize, usize),
    /// Something is put in.
    Inserted(usize, usize),
    /// A run of bytes stands twice.
    Copied(usize, usize, usize),
    /// A word or number becomes an odd value.
    Odd(usize, usize),
    /// A word or number becomes another one of the text.
    Swapped(usize, usize),
    /// The rest is lost.
    Cut(usize),
}

/// Texts with one to four damages each.
pub fn damaged(text: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    (text, prop::collection::vec(damage(), 1..5)).prop_map(|(text, damages)| {
        let bytes = damages.iter().fold(text.into_bytes(), |bytes, damage| damage.apply(bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A run of `usual` cases, or of as many as the environment variable `PROPTEST_CASES` says.
pub fn cases(usual: u32) -> Config {
    let wanted = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    Config::with_cases(wanted.unwrap_or(usual))
}

fn damage() -> impl Strategy<Value = Damage> {
    let place = any::<usize>;
    prop_oneof![
        1 => (place(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        1 => (place(), 1..40_usize).prop_map(|(at, len)| Damage::Lost(at, len)),
        1 => (place(), place()).prop_map(|(at, odd)| Damage::Inserted(at, odd)),
        1 => (place(), 1..80_usize, place()).prop_map(|(from, len, to)| Damage::Copied(from, len, to)),
        4 => (place(), place()).prop_map(|(word, odd)| Damage::Odd(word, odd)),
        4 => (place(), place()).prop_map(|(word, other)| Damage::Swapped(word, other)),
        1 => place().prop_map(Damage::Cut),
    ]
}

impl Damage {
    fn apply(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        if bytes.is_empty() {
            return bytes;
        }
        let len = bytes.len();
        let run = |at: usize, run: usize| at % len..(at % len + run).min(len);
        match *self {
            Self::Byte(at, byte) => bytes[at % len] = byte,
            Self::Lost(at, lost) => drop(bytes.drain(run(at, lost))),
            Self::Inserted(at, odd) => drop(bytes.splice(run(at, 0), ODD[odd % ODD.len()].bytes())),
            Self::Copied(from, copied, to) => {
                let copy = bytes[run(from, copied)].to_vec();
                drop(bytes.splice(run(to, 0), copy));
            }
            Self::Odd(word, odd) => {
                let word = nth_word(&bytes, word);
                drop(bytes.splice(word, ODD[odd % ODD.len()].bytes()));
            }
            Self::Swapped(word, other) => {
                let other = bytes[nth_word(&bytes, other)].to_vec();
                let word = nth_word(&bytes, word);
                drop(bytes.splice(word, other));
            }
            Self::Cut(at) => bytes.truncate(at % len),
        }
        bytes
    }
}

/// A run of letters, digits, points, signs and underscores.
fn nth_word(bytes: &[u8], nth: usize) -> Range<usize> {
    let part_of_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"._+-".contains(byte);
    let starts: Vec<usize> =
        (0..bytes.len()).filter(|&at| part_of_word(&bytes[at]) && (at == 0 || !part_of_word(&bytes[at - 1]))).collect();
    if starts.is_empty() {
        return 0..0;
    }
    let start = starts[nth % starts.len()];
    start..start + bytes[start..].iter().take_while(|byte| part_of_word(byte)).count()
}
