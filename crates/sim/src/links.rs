//! What travels from rank to rank, and how messages share links: by a rule that looks at the Program alone, not at the
//! clock, so that what is slower never ends earlier.

use std::collections::HashMap;

use rannc_plan::{Action, BatchKind, Channel, CheckError, Exchange, Message, Payload, Program, Script};

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

/// What moves on one end of a link at a time: a rank, its Stage, one that this exchanges with, what, and for which
/// microbatch.
type End = (u32, u32, u32, Payload, u32);

/// By channel of a script, its messages in order. Every message takes the time of one with all that shares its links:
/// what its sender sends to the receiver's Stage, or its receiver gets from the sender's, for the same microbatch.
pub(crate) fn parcels(program: &Program, script: &Script, costs: &dyn Costs) -> Result<Vec<Vec<Parcel>>, SimError> {
    let ends = |src: u32, message: &Message| -> Result<[End; 2], SimError> {
        let &Message { kind, mb, peer: dst, stages, .. } = message;
        let only_stage = |rank: u32| program.ranks.get(rank as usize)?.seat(None).map(|seat| seat.stage);
        let stages = stages.or_else(|| only_stage(src).zip(only_stage(dst)));
        let (from, to) = stages.ok_or(CheckError::Shape("a message does not tell between which stages it goes"))?;
        Ok([(src, from, to, kind, mb), (dst, to, from, kind, mb)])
    };
    let mut shared_bytes: HashMap<End, u64> = HashMap::new();
    for (src, message) in sends(program) {
        let sizes = message.pieces.iter().map(|piece| costs.value_bytes(piece.value, piece.rows.rows()));
        let bytes = sizes.fold(0, u64::saturating_add);
        for end in ends(src, message)? {
            let sum = shared_bytes.entry(end).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    let channel_of: HashMap<Channel, usize> =
        script.channels.iter().enumerate().map(|(number, &channel)| (channel, number)).collect();
    let mut parcels = vec![Vec::new(); script.channels.len()];
    for (src, message) in sends(program) {
        let &Message { mb, peer, kind, stages, .. } = message;
        let bytes = ends(src, message)?.map(|end| shared_bytes[&end]).into_iter().fold(0, u64::max);
        let name = || format!("messages of {bytes} bytes from rank {src} to rank {peer}");
        let us = time(costs.send_us(src, peer, bytes), name)?;
        parcels[channel_of[&Channel { src, dst: peer, stages }]].push(Parcel { payload: kind, mb, us });
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

/// Bytes from a rank to another.
type Load = (u32, u32, u64);

/// By kind and microbatch, the time of what ranks exchange: each rank's links carry all that it gives at once, and all that it
/// takes.
pub(crate) fn exchanges_us(program: &Program, costs: &dyn Costs) -> Result<HashMap<(BatchKind, u32), f64>, SimError> {
    let mut moved: HashMap<(BatchKind, u32), Vec<Load>> = HashMap::new();
    for own in &program.ranks {
        for action in own.forward.iter().chain(&own.backward) {
            let Action::Exchange(Exchange { kind, mb, sends, .. }) = action else { continue };
            let parcels = moved.entry((*kind, *mb)).or_default();
            for parcel in sends {
                let sizes = parcel.pieces.iter().map(|piece| costs.value_bytes(piece.value, piece.rows.rows()));
                parcels.push((own.rank, parcel.peer, sizes.fold(0, u64::saturating_add)));
            }
        }
    }
    moved.into_iter().map(|(exchange, parcels)| Ok((exchange, exchange_us(&parcels, costs)?))).collect()
}

fn exchange_us(parcels: &[Load], costs: &dyn Costs) -> Result<f64, SimError> {
    let (mut given, mut taken) = (HashMap::<u32, u64>::new(), HashMap::<u32, u64>::new());
    for &(src, dst, bytes) in parcels {
        for (sums, rank) in [(&mut given, src), (&mut taken, dst)] {
            let sum = sums.entry(rank).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    let mut longest_us = 0.0_f64;
    for &(src, dst, _) in parcels {
        let bytes = given[&src].max(taken[&dst]);
        let name = || format!("an exchange of {bytes} bytes from rank {src} to rank {dst}");
        longest_us = longest_us.max(time(costs.send_us(src, dst, bytes), name)?);
    }
    Ok(longest_us)
}
