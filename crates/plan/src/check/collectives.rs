//! Is every gradient summed once over those who hold its Param, and do all members of a group do the same?

use std::collections::{BTreeMap, BTreeSet};

use rannc_ir::ParamId;

use super::{ActionFault, CheckError};
use crate::program::{Action, Bucket, Gradient, Program, RankProgram};
use crate::saver::Sharding;

/// Checks that the buckets hold every gradient once, over the ranks that hold its Param.
pub(super) fn check_buckets(program: &Program, gradients: &[Gradient]) -> Result<(), CheckError> {
    let fault = |param, problem| Err(CheckError::Gradient { param, problem });
    let mut seen: BTreeSet<&[u32]> = BTreeSet::new();
    for ranks in &program.groups {
        let known = ranks.last().is_some_and(|&last| (last as usize) < program.ranks.len());
        if !known || !ranks.is_sorted_by(|a, b| a < b) || !seen.insert(ranks) {
            return Err(CheckError::Shape(
                "a group is empty, out of order, there twice, or has a rank that does not exist",
            ));
        }
    }
    let known: BTreeMap<ParamId, &Gradient> = gradients.iter().map(|gradient| (gradient.param, gradient)).collect();
    let mut summed: BTreeSet<ParamId> = BTreeSet::new();
    for Bucket { group, params, dtype, bytes, sharding, parts } in &program.buckets {
        let ranks = program.groups.get(*group as usize).ok_or(CheckError::Shape("a bucket's group does not exist"))?;
        let (mut sum, mut elements): (u64, u64) = (0, 0);
        for &param in params {
            let Some(gradient) = known.get(&param) else { return fault(param, "is summed, but there is none") };
            if !summed.insert(param) {
                return fault(param, "is in two buckets");
            }
            if gradient.holders != *ranks {
                return fault(param, "is not summed over exactly the ranks that hold it");
            }
            if gradient.dtype != *dtype {
                return fault(param, "is in a bucket of another type");
            }
            if gradient.sharding != *sharding {
                return fault(param, "is in a bucket of which something else is divided");
            }
            sum = sum.saturating_add(gradient.bytes);
            elements = elements.saturating_add(gradient.elements);
        }
        let held = parts.iter().fold(0, |held: u64, &part| held.saturating_add(part));
        let divided = *sharding != Sharding::None;
        if divided != !parts.is_empty() || (divided && (parts.len() != ranks.len() || held < elements)) {
            return Err(CheckError::Shape("a bucket's parts are not those of its ranks, or do not hold its gradients"));
        }
        if sum != *bytes {
            return Err(CheckError::Shape("a bucket is not as large as its gradients"));
        }
    }
    match known.keys().find(|param| !summed.contains(param)) {
        Some(&param) => fault(param, "is in no bucket"),
        None => Ok(()),
    }
}

/// Checks that every rank sums its buckets once and in the order of its groups' other members.
pub(super) fn check_sums(program: &Program) -> Result<(), CheckError> {
    let mut orders: BTreeMap<u32, Vec<(u32, Vec<u32>)>> = BTreeMap::new();
    for own in &program.ranks {
        let mut summed: BTreeSet<u32> = BTreeSet::new();
        let mut by_group: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let backwards = actions(own).filter(|action| matches!(action, Action::Backward { .. })).count();
        let mut done = 0;
        for (position, action) in actions(own).enumerate() {
            done += usize::from(matches!(action, Action::Backward { .. }));
            let &Action::AllReduce { group, bucket, bytes } = action else { continue };
            let found = check_sum(program, own.rank, group, bucket, bytes).and_then(|()| match () {
                () if !summed.insert(bucket) => Err(ActionFault::Repeated),
                () if done + 1 < backwards => Err(ActionFault::NotFilled),
                () => Ok(()),
            });
            found.map_err(|fault| CheckError::Action { rank: own.rank, position, action: action.clone(), fault })?;
            by_group.entry(group).or_default().push(bucket);
        }
        check_all_summed(program, own, &summed)?;
        by_group.into_iter().for_each(|(group, buckets)| orders.entry(group).or_default().push((own.rank, buckets)));
    }
    for (group, members) in orders {
        let (first, others) = &members[0];
        if let Some((rank, own)) = members.iter().find(|(_, own)| own != others) {
            let (own, others) = (own.clone(), others.clone());
            return Err(CheckError::Order { group, rank: *rank, own, other: *first, others });
        }
    }
    Ok(())
}

fn check_sum(program: &Program, rank: u32, group: u32, bucket: u32, bytes: u64) -> Result<(), ActionFault> {
    let found = program.buckets.get(bucket as usize).filter(|found| found.group == group);
    let member = program.groups.get(group as usize).is_some_and(|ranks| ranks.contains(&rank));
    match found {
        Some(found) if member && found.bytes == bytes => Ok(()),
        Some(found) if member => Err(ActionFault::WrongBytes(found.bytes)),
        _ => Err(ActionFault::WrongGroup),
    }
}

/// Demands that a rank of a Program that trains sums all that others hold too.
fn check_all_summed(program: &Program, own: &RankProgram, summed: &BTreeSet<u32>) -> Result<(), CheckError> {
    for (number, &Bucket { group, bytes, .. }) in (0..).zip(&program.buckets) {
        let ranks = &program.groups[group as usize];
        let shared = program.call.trains() && ranks.len() > 1 && ranks.contains(&own.rank);
        if shared && !summed.contains(&number) {
            let action = Action::AllReduce { group, bucket: number, bytes };
            return Err(CheckError::Missing { rank: own.rank, action });
        }
    }
    Ok(())
}

fn actions(own: &RankProgram) -> impl Iterator<Item = &Action> {
    own.forward.iter().chain(&own.backward)
}
