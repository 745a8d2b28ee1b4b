//! How large buckets of gradients are.

/// Size at which the first bucket of a Stage's gradients is full. It is small, so that sums begin early.
pub const FIRST_BUCKET_BYTES: u64 = 1 << 20;

/// Size at which the last buckets are full where links are not known: their sums have nothing left to hide under.
pub const BUCKET_BYTES: u64 = 25 << 20;

/// Size at which any bucket is full: what is in it waits for its sum twice, as it came and in the bucket.
pub const LARGEST_BUCKET_BYTES: u64 = 128 << 20;

/// Between them a bucket is full with this part of what is still to come. Each bucket costs the host a few launches, and
/// its sum starts when it is full.
const PARTS_TO_COME: u64 = 4;

/// Size at which a bucket is full that is not its Stage's first, with `to_come` bytes from its beginning on, where the last
/// ones are full at `least` bytes.
pub fn full_bytes(to_come: u64, least: u64) -> u64 {
    (to_come / PARTS_TO_COME).max(least).min(LARGEST_BUCKET_BYTES)
}
