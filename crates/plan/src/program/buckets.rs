//! Buckets: gradients that are reduced together, each bucket as soon as the backward has filled it.

/// Size at which the first bucket of a Stage's gradients is full. It is small, so that reductions begin early.
pub const FIRST_BUCKET_BYTES: u64 = 1 << 20;

/// Size at which any later bucket is full.
pub const BUCKET_BYTES: u64 = 25 << 20;
