//! What travels from rank to rank, and how messages share links: by a rule that looks at the Program alone, not at the
//! clock, so that what is slower never ends earlier.

use std::collections::HashMap;

use rannc_plan::{Action, Channel, Message, Payload, Program, Script};

use crate::costs::{Costs, time};
use crate::error::SimError;

/// What a channel carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parcel {
    pub(crate) payload: Payload,
    pub(crate) mb: u32,
    /// Its time, beside all that shares its links.
    pub(crate) us: f64,
}

/// What moves on one end of a link at a time: a rank, a Stage that it exchanges with, what, and for which microbatch.
type End = (u32, u32, Payload, u32);

/// By channel of a script, its messages in order. Every message takes the time of one with all that shares its links:
/// what its sender sends to the receiver's Stage, or its receiver gets from the sender's, for the same microbatch.
pub(crate) fn parcels(program: &Program, script: &Script, costs: &dyn Costs) -> Result<Vec<Vec<Parcel>>, SimError> {
    let stage_of = |rank: u32| program.ranks[rank as usize].stage;
    let ends = |src, dst, &Message { kind, mb, .. }: &Message| -> [End; 2] {
        [(src, stage_of(dst)), (dst, stage_of(src))].map(|(rank, stage)| (rank, stage, kind, mb))
    };
    let mut shared_bytes: HashMap<End, u64> = HashMap::new();
    for (src, message) in sends(program) {
        let sizes = message.pieces.iter().map(|piece| costs.value_bytes(piece.value, piece.rows.rows()));
        let bytes = sizes.fold(0, u64::saturating_add);
        for end in ends(src, message.peer, message) {
            let sum = shared_bytes.entry(end).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    let channel_of: HashMap<Channel, usize> =
        script.channels.iter().enumerate().map(|(number, &channel)| (channel, number)).collect();
    let mut parcels = vec![Vec::new(); script.channels.len()];
    for (src, message) in sends(program) {
        let &Message { mb, peer, kind, .. } = message;
        let bytes = ends(src, peer, message).map(|end| shared_bytes[&end]).into_iter().fold(0, u64::max);
        let name = || format!("messages of {bytes} bytes from rank {src} to rank {peer}");
        let us = time(costs.send_us(src, peer, bytes), name)?;
        let channel = Channel { src, dst: peer, road: kind.road() };
        parcels[channel_of[&channel]].push(Parcel { payload: kind, mb, us });
    }
    Ok(parcels)
}

/// All messages with their senders, each sender's in order.
fn sends(program: &Program) -> impl Iterator<Item = (u32, &Message)> {
    program.ranks.iter().flat_map(|own| {
        own.forward.iter().chain(&own.backward).filter_map(|action| match action {
            Action::Send(message) => Some((own.rank, message)),
            _ => None,
        })
    })
}
