//! Params and gradients that are whole for a while although Replicas divide them, which those of ranks with several seats do
//! not. How many does not depend on the rows.
//!
//! Params are gathered one Span ahead of the computation and freed behind it, so that those of two Spans are whole at a
//! time; those gathered before another computation than theirs stay. Where Params are gathered once and kept, all are
//! whole, and there is nothing to prove. Gradients of a backward fill the buckets in the order of their numbers; a bucket is
//! whole until its sum has ended, and sums start in the order of the Actions; what a rank gets of a sum may come beside it. When
//! a bucket is full, sums that are under way end, but for those of its Span. What a rank sums of a microbatch of which it has
//! no rows lies where others have activations.

use std::collections::{BTreeMap, BTreeSet};

use super::promises::Promises;
use super::{Holding, actions, refused};
use crate::check::CheckError;
use crate::check::layout::computed_rows;
use crate::program::{Action, Bucket, Pass, Program, RankProgram};
use crate::saver::Sharding;

/// Checks how much of its Params a rank gathers at a time.
pub(super) fn check_gathers(program: &Program, own: &RankProgram, promises: &Promises) -> Result<(), CheckError> {
    let promised = promises.whole(own).params_bytes;
    if two_spans_bytes(program, own, promises) > promised {
        return Ok(());
    }
    let mut gathered: Vec<Gathered> = Vec::new();
    for (position, action) in actions(own).enumerate() {
        match *action {
            Action::AllGather { bucket, mb, pass, .. } => {
                let bucket = &program.buckets[bucket as usize];
                if bucket.sharding == Sharding::KeptParams {
                    continue;
                }
                gathered.retain(|other| other.of == (mb, pass) || has_rows(program, own, other.of.0));
                Gathered::add(&mut gathered, (mb, pass), bucket.span, promises.gathered_bytes(bucket));
                let bytes = whole_bytes(&gathered, (mb, pass));
                if bytes > promised {
                    return Err(refused(own, position, Holding::Params, bytes, promised));
                }
            }
            Action::Forward { mb, .. } => gathered.retain(|other| other.of != (mb, Pass::Forward)),
            Action::Backward { mb, .. } => gathered.retain(|other| other.of != (mb, Pass::Backward)),
            _ => {}
        }
    }
    Ok(())
}

/// What was gathered for a computation to come.
struct Gathered {
    of: (u32, Pass),
    /// The Params of its Spans so far, by Span.
    spans: Vec<(Option<u32>, u64)>,
}

impl Gathered {
    fn add(all: &mut Vec<Self>, of: (u32, Pass), span: Option<u32>, bytes: u64) {
        let known = all.iter().position(|own| own.of == of);
        let place = known.unwrap_or_else(|| {
            all.push(Self { of, spans: Vec::new() });
            all.len() - 1
        });
        match all[place].spans.last_mut() {
            Some((last, sum)) if *last == span => *sum += bytes,
            _ => all[place].spans.push((span, bytes)),
        }
    }
}

/// What is whole while one computation's Params are gathered: of it the last two Spans, of others all.
fn whole_bytes(gathered: &[Gathered], current: (u32, Pass)) -> u64 {
    let of = |own: &Gathered| -> u64 {
        let count = if own.of == current { 2 } else { own.spans.len() };
        own.spans.iter().rev().take(count).map(|(_, bytes)| bytes).sum()
    };
    gathered.iter().map(of).sum()
}

/// The Params of the two largest Spans of a rank that follow each other.
fn two_spans_bytes(program: &Program, own: &RankProgram, promises: &Promises) -> u64 {
    let mut spans: BTreeMap<Option<u32>, u64> = BTreeMap::new();
    for (_, bucket) in divided(program, own).filter(|(_, bucket)| bucket.sharding == Sharding::Params) {
        *spans.entry(bucket.span).or_default() += promises.gathered_bytes(bucket);
    }
    let sizes: Vec<u64> = spans.into_values().collect();
    let pairs = sizes.windows(2).map(|pair| pair.iter().sum());
    pairs.chain(sizes.iter().copied()).max().unwrap_or(0)
}

/// Checks how much a rank has of gradients before their sums have ended.
pub(super) fn check_sums(program: &Program, own: &RankProgram, promises: &Promises) -> Result<(), CheckError> {
    let promised = promises.whole(own).grads_bytes;
    let in_order: Vec<u32> = divided(program, own).map(|(number, _)| number).collect();
    if summed_bytes(program, &in_order) > promised {
        return Ok(());
    }
    let mut to_sum: Vec<u32> = Vec::new();
    for (position, action) in actions(own).enumerate() {
        match *action {
            Action::ReduceScatter { bucket, mb, .. } if has_rows(program, own, mb) => to_sum.push(bucket),
            Action::Backward { .. } => {
                let bytes = summed_bytes(program, &to_sum);
                if bytes > promised {
                    return Err(refused(own, position, Holding::Gradients, bytes, promised));
                }
                to_sum.clear();
            }
            _ => {}
        }
    }
    Ok(())
}

/// The most that is whole in a backward whose buckets are summed in this order.
fn summed_bytes(program: &Program, order: &[u32]) -> u64 {
    let bucket = |number: u32| &program.buckets[number as usize];
    let ranks = |bucket: &Bucket| program.groups[bucket.group as usize].len() as u64;
    let mut due = order.iter().copied().peekable();
    let mut filled = BTreeSet::new();
    let mut under_way: Vec<(Option<u32>, u64)> = Vec::new();
    let (mut waiting, mut most) = (0, 0);
    for number in order.iter().copied().collect::<BTreeSet<u32>>() {
        let coming = bucket(number);
        filled.insert(number);
        waiting += coming.bytes;
        most = most.max(waiting + under_way.iter().map(|(_, bytes)| bytes).sum::<u64>());
        under_way.retain(|&(span, _)| span.is_some() && span == coming.span);
        while let Some(next) = due.next_if(|next| filled.contains(next)).map(bucket) {
            waiting -= next.bytes;
            under_way.push((next.span, next.bytes + next.bytes / ranks(next)));
        }
    }
    most
}

/// The buckets of which a rank has a part of the gradients, with their numbers.
fn divided<'p>(program: &'p Program, own: &RankProgram) -> impl Iterator<Item = (u32, &'p Bucket)> {
    let rank = own.rank;
    (0..).zip(&program.buckets).filter(move |(_, bucket)| {
        let ranks = &program.groups[bucket.group as usize];
        bucket.sharding >= Sharding::Gradients && ranks.len() > 1 && ranks.contains(&rank)
    })
}

fn has_rows(program: &Program, own: &RankProgram, mb: u32) -> bool {
    own.seats.iter().any(|&seat| !computed_rows(program, seat, mb as usize).is_empty())
}
