//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Four random words for a counter.
#[inline]
pub const fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < ROUNDS {
        let first = MULTIPLIERS[0] as u64 * counter[0] as u64;
        let second = MULTIPLIERS[1] as u64 * counter[2] as u64;
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        round += 1;
    }
    counter
}

/// An endless row of words: those of one drawing Op in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The number drawn for the call.
    pub key: u64,
    /// The Op.
    pub op: u32,
    /// Tells apart draws of the Op that have no place in the global batch.
    pub salt: u32,
}

impl Stream {
    /// Words `4 * index ..` of the stream.
    #[inline]
    pub const fn block(&self, index: u64) -> [u32; 4] {
        philox4x32([index as u32, (index >> 32) as u32, self.op, self.salt], [self.key as u32, (self.key >> 32) as u32])
    }

    /// One word.
    #[inline]
    pub const fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors publish with Random123.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter, key), expected);
        }
    }

    #[test]
    fn a_stream_counts_in_its_first_two_words() {
        let stream = Stream { key: 0xa409_3822 | 0x299f_31d0 << 32, op: 0x1319_8a2e, salt: 0x0370_7344 };
        let block = 0x243f_6a88 | 0x85a3_08d3 << 32;
        assert_eq!(stream.block(block), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
        let near = Stream { key: 3, op: 2, salt: 0 };
        assert_eq!((0..4).map(|lane| near.word(4 * 7 + lane)).collect::<Vec<_>>(), near.block(7));
    }
}
