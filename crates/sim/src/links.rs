//! What travels from rank to rank, and how messages share links: by a rule that looks at the Program alone, not at the clock, so that what is slower never
//! ends earlier.

use std::collections::HashMap;

use rannc_plan::{Payload, Program};

use crate::costs::{Costs, time};
use crate::error::SimError;

/// What a channel carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parcel {
    pub(crate) payload: Payload,
    pub(crate) mb: u32,
    /// Its size.
    pub(crate) bytes: u64,
    /// Its time, beside all that shares its links.
    pub(crate) us: f64,
}

/// Messages from one rank to another, in order.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) src: u32,
    pub(crate) dst: u32,
    pub(crate) parcels: Vec<Parcel>,
}

/// Gives every message the time of one with all that shares its links: what its sender sends to the
/// receiver's Stage, or its receiver gets from the sender's, for the same microbatch.
pub(crate) fn share_links(program: &Program, costs: &dyn Costs, channels: &mut [Channel]) -> Result<(), SimError> {
    let stage_of = |rank: u32| program.ranks[rank as usize].stage;
    let ends = |src, dst, parcel: &Parcel| {
        [(src, stage_of(dst)), (dst, stage_of(src))].map(|end| (end, parcel.payload, parcel.mb))
    };
    let mut shared_bytes: HashMap<_, u64> = HashMap::new();
    for Channel { src, dst, parcels } in &*channels {
        for parcel in parcels {
            for end in ends(*src, *dst, parcel) {
                let sum = shared_bytes.entry(end).or_default();
                *sum = sum.saturating_add(parcel.bytes);
            }
        }
    }
    for Channel { src, dst, parcels } in channels {
        for parcel in parcels {
            let bytes = ends(*src, *dst, parcel).map(|end| shared_bytes[&end]).into_iter().fold(0, u64::max);
            let name = || format!("messages of {bytes} bytes from rank {src} to rank {dst}");
            parcel.us = time(costs.send_us(*src, *dst, bytes), name)?;
        }
    }
    Ok(())
}
