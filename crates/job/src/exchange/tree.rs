//! Who speaks with whom in an exchange: a tree whose parts are runs of ranks.
//!
//! A rank is below the one whose number is its own with the last octal digit that is not 0 made 0. Ranks of a host with 8
//! of them thus speak with the first of their host, and few with another host. A message climbs log8 of the ranks.

const RADIX: u32 = 8;

/// The rank that `rank` is below of; none for rank 0.
pub fn above(rank: u32) -> Option<u32> {
    (rank > 0).then(|| rank - rank % unit(rank).saturating_mul(RADIX))
}

/// The ranks just below `rank`. With all that is below them, they follow it and each other without a gap.
pub fn below(rank: u32, world_size: u32) -> Vec<u32> {
    let end = if rank == 0 { world_size } else { unit(rank) };
    let units = std::iter::successors(Some(1), |unit: &u32| unit.checked_mul(RADIX)).take_while(|unit| *unit < end);
    let all = units.flat_map(|unit| (1..RADIX).map_while(move |digit| rank.checked_add(digit.checked_mul(unit)?)));
    all.filter(|below| *below < world_size).collect()
}

/// The greatest power of 8 that divides `rank`.
fn unit(rank: u32) -> u32 {
    RADIX.pow(rank.trailing_zeros() / RADIX.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `rank` and all below it, in the order in which their texts are joined.
    fn joined(rank: u32, world_size: u32) -> Vec<u32> {
        let below = below(rank, world_size);
        [rank].into_iter().chain(below.into_iter().flat_map(|rank| joined(rank, world_size))).collect()
    }

    #[test]
    fn texts_are_joined_in_the_order_of_the_ranks() {
        for world_size in (1..200).chain([511, 512, 513, 1000, 4097, 10_240]) {
            assert_eq!(joined(0, world_size), (0..world_size).collect::<Vec<_>>());
        }
    }

    #[test]
    fn above_and_below_are_the_same_lines() {
        for rank in 0..1000 {
            assert!(below(rank, 1000).iter().all(|below| above(*below) == Some(rank)));
        }
        assert_eq!(above(0), None);
    }

    #[test]
    fn ranks_of_a_host_speak_with_its_first() {
        assert_eq!(below(24, 64), (25..32).collect::<Vec<_>>());
        assert_eq!(below(0, 64), (1..8).chain((8..64).step_by(8)).collect::<Vec<_>>());
    }
}
