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

/// Numbers at the edges of their types.
const ODD_NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "7",
    "0.5",
    "-0.0",
    "1e-320",
    "1e308",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
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
    /// A number becomes an odd one.
    OddNumber(usize, usize),
    /// A number becomes another one of the text.
    OtherNumber(usize, usize),
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
        1 => (place(), place()).prop_map(|(word, odd)| Damage::Odd(word, odd)),
        1 => (place(), place()).prop_map(|(word, other)| Damage::Swapped(word, other)),
        4 => (place(), place()).prop_map(|(number, odd)| Damage::OddNumber(number, odd)),
        4 => (place(), place()).prop_map(|(number, other)| Damage::OtherNumber(number, other)),
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
            Self::Odd(word, odd) => replace(&mut bytes, is_word, word, |_| ODD[odd % ODD.len()].as_bytes().to_vec()),
            Self::Swapped(word, other) => {
                replace(&mut bytes, is_word, word, |bytes| bytes[nth_run(bytes, is_word, other)].to_vec());
            }
            Self::OddNumber(number, odd) => {
                replace(&mut bytes, is_number, number, |_| ODD_NUMBERS[odd % ODD_NUMBERS.len()].as_bytes().to_vec())
            }
            Self::OtherNumber(number, other) => {
                replace(&mut bytes, is_number, number, |bytes| bytes[nth_run(bytes, is_number, other)].to_vec());
            }
            Self::Cut(at) => bytes.truncate(at % len),
        }
        bytes
    }
}

/// Puts something else in place of the nth run that `is_run` accepts.
fn replace(bytes: &mut Vec<u8>, is_run: fn(&[u8]) -> bool, nth: usize, other: impl Fn(&[u8]) -> Vec<u8>) {
    let other = other(bytes);
    drop(bytes.splice(nth_run(bytes, is_run, nth), other));
}

fn is_word(_: &[u8]) -> bool {
    true
}

fn is_number(run: &[u8]) -> bool {
    std::str::from_utf8(run).is_ok_and(|run| run.parse::<f64>().is_ok())
}

/// A run of letters, digits, points, signs and underscores; an empty one where none is accepted.
fn nth_run(bytes: &[u8], is_run: fn(&[u8]) -> bool, nth: usize) -> Range<usize> {
    let part_of_run = |byte: &u8| byte.is_ascii_alphanumeric() || b"._+-".contains(byte);
    let mut runs = Vec::new();
    let mut at = 0;
    for piece in bytes.chunk_by(|a, b| part_of_run(a) == part_of_run(b)) {
        if part_of_run(&piece[0]) && is_run(piece) {
            runs.push(at..at + piece.len());
        }
        at += piece.len();
    }
    let runs_in_all = runs.len().max(1);
    runs.into_iter().nth(nth % runs_in_all).unwrap_or(0..0)
}
