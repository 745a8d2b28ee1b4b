//! A tensor's memory filled from a stream.

use rayon::prelude::*;

use crate::philox::Stream;
use crate::place::Place;

/// Elements that one thread fills at a time.
const CHUNK: usize = 1 << 15;
/// Blocks that are computed side by side, for vector units.
const LANES: usize = 16;

/// A word for each element, in the machine's order of bytes. `bytes` holds four for each.
pub fn words(stream: &Stream, place: &Place, bytes: &mut [u8]) {
    fill::<4>(stream, place, bytes, |word, out| out.copy_from_slice(&word.to_ne_bytes()));
}

/// One byte for each element: 1 where the word is at least `threshold`, else 0. So the share of zeros is
/// `threshold / 2^32`.
pub fn keep(stream: &Stream, place: &Place, threshold: u64, bytes: &mut [u8]) {
    fill::<1>(stream, place, bytes, |word, out| out[0] = u8::from(u64::from(word) >= threshold));
}

fn fill<const SIZE: usize>(stream: &Stream, place: &Place, bytes: &mut [u8], put: impl Fn(u32, &mut [u8]) + Sync) {
    if place.is_empty() {
        return;
    }
    let fill_chunk = |(index, chunk): (usize, &mut [u8])| {
        let mut element = (index * CHUNK) as u64;
        let mut rest = chunk;
        while !rest.is_empty() {
            let run = place.run_at(element);
            let len = (rest.len() / SIZE).min(usize::try_from(run.len).unwrap_or(usize::MAX));
            if len == 0 {
                return;
            }
            let (now, later) = rest.split_at_mut(len * SIZE);
            fill_run::<SIZE>(stream, run.number, now, &put);
            element += len as u64;
            rest = later;
        }
    };
    if bytes.len() <= CHUNK * SIZE {
        fill_chunk((0, bytes));
    } else {
        bytes.par_chunks_mut(CHUNK * SIZE).enumerate().for_each(fill_chunk);
    }
}

/// Fills elements whose numbers follow one another.
fn fill_run<const SIZE: usize>(stream: &Stream, first: u64, bytes: &mut [u8], put: &impl Fn(u32, &mut [u8])) {
    let until_block = (first.wrapping_neg() % 4) as usize;
    let (head, body) = bytes.split_at_mut((until_block * SIZE).min(bytes.len()));
    for (number, out) in (first..).zip(head.chunks_exact_mut(SIZE)) {
        put(stream.word(number), out);
    }
    let mut block = first.div_ceil(4);
    let mut many = body.chunks_exact_mut(4 * LANES * SIZE);
    for group in &mut many {
        let blocks: [[u32; 4]; LANES] = std::array::from_fn(|lane| stream.block(block + lane as u64));
        for (word, out) in blocks.as_flattened().iter().zip(group.chunks_exact_mut(SIZE)) {
            put(*word, out);
        }
        block += LANES as u64;
    }
    for group in many.into_remainder().chunks_mut(4 * SIZE) {
        for (word, out) in stream.block(block).iter().zip(group.chunks_exact_mut(SIZE)) {
            put(*word, out);
        }
        block += 1;
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a single run of lines is what is meant
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: Stream = Stream { key: 0x0123_4567_89ab_cdef, op: 5, salt: 0 };

    fn all_words(place: &Place) -> Vec<u32> {
        let mut bytes = vec![0; usize::try_from(place.len()).expect("it is small") * 4];
        words(&STREAM, place, &mut bytes);
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()
    }

    proptest! {
        /// Each element by itself, from the definition of its number.
        #[test]
        fn words_are_those_of_the_numbers(
            outer in 1u64..4,
            inner in 1u64..300,
            lines in prop::collection::vec((0u64..1 << 40, 0u64..5), 0..4),
        ) {
            let runs: Vec<_> = lines.iter().map(|&(start, len)| start..start + len).collect();
            let found = all_words(&Place::new(outer, inner, runs.clone()).expect("it is small"));
            let mut at = found.iter();
            for o in 0..outer {
                for line in runs.iter().cloned().flatten() {
                    for i in 0..inner {
                        prop_assert_eq!(at.next(), Some(&STREAM.word((line * outer + o) * inner + i)));
                    }
                }
            }
            prop_assert_eq!(at.next(), None);
        }
    }

    #[test]
    fn chunks_of_threads_join() {
        let whole = Place::new(1, 3 * CHUNK as u64 + 7, vec![1..2]).expect("it is small");
        for (number, word) in (3 * CHUNK as u64 + 7..).zip(all_words(&whole)) {
            assert_eq!(word, STREAM.word(number), "element {number}");
        }
    }

    #[test]
    fn masks_compare_words_with_the_threshold() {
        let place = Place::new(3, 7, vec![2..30]).expect("it is small");
        for (threshold, all) in [(0, Some(1)), (1 << 31, None), (1 << 32, Some(0))] {
            let mut mask = vec![2; usize::try_from(place.len()).expect("it is small")];
            keep(&STREAM, &place, threshold, &mut mask);
            for (word, &kept) in all_words(&place).into_iter().zip(&mask) {
                assert_eq!(kept, u8::from(u64::from(word) >= threshold));
                assert!(all.is_none_or(|all| all == kept));
            }
        }
    }
}
