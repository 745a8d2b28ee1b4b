//! Is every gradient summed once over those who hold its Param, and do all members of a group do the same?

use std::collections::{BTreeMap, BTreeSet, HashSet};

use rannc_ir::ParamId;

use super::{ActionFault, CheckError};
use crate::program::{Action, Bucket, Gradient, Pass, Program, RankProgram};
use crate::saver::Sharding;
use crate::schedule::Call;

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
    for Bucket { group, params, dtype, bytes, sharding, parts, span, gathered } in &program.buckets {
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
            if gradient.span != *span {
                return fault(param, "is in a bucket of another span");
            }
            if gradient.gathered != *gathered {
                return fault(param, "is in a bucket that is gathered in another type");
            }
            sum = sum.saturating_add(gradient.bytes);
            elements = elements.saturating_add(gradient.elements);
        }
        let held = parts.iter().fold(0, |held: u64, &part| held.saturating_add(part));
        let divided = *sharding != Sharding::None;
        if divided == parts.is_empty() || (divided && (parts.len() != ranks.len() || held < elements)) {
            return Err(CheckError::Shape("a bucket's parts are not those of its ranks, or do not hold its gradients"));
        }
        let is_shared = |rank: &u32| program.ranks[*rank as usize].has_several_seats();
        if *sharding >= Sharding::Gradients && ranks.len() > 1 && ranks.iter().any(is_shared) {
            return Err(CheckError::Shape("ranks with several stages divide gradients"));
        }
        if span.is_some() != sharding.divides_params() {
            return Err(CheckError::Shape("a bucket has a span and no divided parameters, or the reverse"));
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
    let mut orders: BTreeMap<u32, (u32, Vec<&Action>)> = BTreeMap::new();
    for own in &program.ranks {
        let mut summed: HashSet<&Action> = HashSet::new();
        let mut by_group: BTreeMap<u32, Vec<&Action>> = BTreeMap::new();
        let mut passed = Backwards::of(own);
        let mut gathered = Gathered::default();
        for (position, action) in actions(own).enumerate() {
            match action {
                Action::Forward { mb, .. } => _ = gathered.computed.insert((*mb, Pass::Forward)),
                Action::Backward { mb, .. } | Action::BackwardInput { mb, .. } => {
                    gathered.computed.insert((*mb, Pass::Backward));
                }
                _ => {}
            }
            filling(action).into_iter().for_each(|filling| passed.pass(filling));
            let Some(group) = action.group() else { continue };
            let found = check_sum(program, own.rank, action)
                .and_then(|()| if summed.insert(action) { Ok(()) } else { Err(ActionFault::Repeated) })
                .and_then(|()| passed.check(action))
                .and_then(|()| gathered.check(program, action));
            found.map_err(|fault| CheckError::Action { rank: own.rank, position, action: action.clone(), fault })?;
            by_group.entry(group).or_default().push(action);
        }
        check_all_summed(program, own, &summed)?;
        for (group, found) in by_group {
            let (first, others) = orders.entry(group).or_insert_with(|| (own.rank, found.clone()));
            if let Some((&own_action, &other)) = found.iter().zip(others.iter()).find(|(own, other)| own != other) {
                let (own_action, others) = (Box::new(own_action.clone()), Box::new(other.clone()));
                return Err(CheckError::Order { rank: own.rank, own: own_action, other: *first, others });
            }
        }
    }
    Ok(())
}

/// The microbatch of an Action behind which nothing adds to its gradients, and its Stage where that has a name.
fn filling(action: &Action) -> Option<Filling> {
    match *action {
        Action::Backward { mb, stage } | Action::BackwardWeight { mb, stage } => Some((mb, stage)),
        _ => None,
    }
}

type Filling = (u32, Option<u32>);

/// A rank's backwards, those that it has ended and those to come.
struct Backwards {
    done: BTreeSet<Filling>,
    to_come: BTreeSet<Filling>,
}

impl Backwards {
    fn of(own: &RankProgram) -> Self {
        Self { done: BTreeSet::new(), to_come: actions(own).filter_map(filling).collect() }
    }

    fn pass(&mut self, filling: Filling) {
        self.to_come.remove(&filling);
        self.done.insert(filling);
    }

    /// Checks that a sum stands behind all backwards that add to it but the one that fills it.
    fn check(&self, action: &Action) -> Result<(), ActionFault> {
        match action {
            Action::ReduceScatter { mb, .. } if self.to_come.first().is_some_and(|(next, _)| next < mb) => {
                Err(ActionFault::NotFilled)
            }
            Action::ReduceScatter { mb, .. } if self.done.last().is_some_and(|(last, _)| last >= mb) => {
                Err(ActionFault::Overfilled)
            }
            Action::AllReduce { .. } if self.to_come.len() > 1 => Err(ActionFault::NotFilled),
            _ => Ok(()),
        }
    }
}

/// A rank's computations so far, and what it has gathered for the one to come, or to keep.
#[derive(Default)]
struct Gathered {
    computed: HashSet<(u32, Pass)>,
    kept: HashSet<(u32, Pass)>,
    last: Option<((u32, Pass), Option<u32>)>,
}

impl Gathered {
    /// Checks that a gather stands before its computation, in the order of the Spans; one of Params that stay whole before
    /// all computations, once.
    fn check(&mut self, program: &Program, action: &Action) -> Result<(), ActionFault> {
        let &Action::AllGather { bucket, mb, pass, .. } = action else { return Ok(()) };
        let Bucket { span, sharding, .. } = program.buckets[bucket as usize];
        let keeps = sharding == Sharding::KeptParams;
        if keeps && (!kept_passes(program.call).contains(&pass) || !self.kept.insert((bucket, pass))) {
            return Err(ActionFault::Repeated);
        }
        let computed = &self.computed;
        if computed.contains(&(mb, pass)) || (keeps && computed.iter().any(|&(_, done)| done == pass)) {
            return Err(ActionFault::TooLate);
        }
        let before = self.last.replace(((mb, pass), span)).filter(|(of, _)| *of == (mb, pass));
        let in_order =
            before.is_none_or(|(_, before)| if pass == Pass::Forward { before <= span } else { span <= before });
        if in_order { Ok(()) } else { Err(ActionFault::WrongSpan) }
    }
}

fn check_sum(program: &Program, rank: u32, action: &Action) -> Result<(), ActionFault> {
    let (group, bucket, mb, bytes) = match *action {
        Action::AllReduce { group, bucket, bytes } => (group, bucket, None, bytes),
        Action::ReduceScatter { group, bucket, mb, bytes } | Action::AllGather { group, bucket, mb, bytes, .. } => {
            (group, bucket, Some(mb), bytes)
        }
        _ => return Ok(()),
    };
    let found = program.buckets.get(bucket as usize).filter(|found| found.group == group);
    let member = program.groups.get(group as usize).is_some_and(|ranks| ranks.contains(&rank));
    let Some(found) = found.filter(|_| member) else { return Err(ActionFault::WrongGroup) };
    let (gathers, sums_parts) = match action {
        Action::AllGather { .. } => (true, false),
        _ => (false, mb.is_some()),
    };
    let size = if gathers { gathered_bytes(found) } else { found.bytes };
    if size != bytes {
        return Err(ActionFault::WrongBytes(size));
    }
    let divided = found.sharding >= Sharding::Gradients;
    if (gathers && !found.sharding.divides_params()) || (!gathers && sums_parts != divided) {
        return Err(ActionFault::WrongSharding(found.sharding));
    }
    let has_rows = |mb: u32| program.microbatches.get(mb as usize).is_some_and(|&rows| rows > 0);
    if mb.is_none_or(has_rows) { Ok(()) } else { Err(ActionFault::NoRows) }
}

/// Demands that a rank of a Program that trains sums all that others hold too.
fn check_all_summed(program: &Program, own: &RankProgram, summed: &HashSet<&Action>) -> Result<(), CheckError> {
    let check = |action| {
        let rank = own.rank;
        if summed.contains(&action) { Ok(()) } else { Err(CheckError::Missing { rank, action }) }
    };
    let trains = program.call.trains();
    let has_rows = || (0..).zip(&program.microbatches).filter(|&(_, &rows)| rows > 0).map(|(mb, _)| mb);
    for (bucket, found) in (0..).zip(&program.buckets) {
        let &Bucket { group, bytes, sharding, .. } = found;
        let ranks = &program.groups[group as usize];
        if ranks.len() < 2 || !ranks.contains(&own.rank) {
            continue;
        }
        let gather =
            |(pass, mb): (Pass, u32)| Action::AllGather { group, bucket, mb, pass, bytes: gathered_bytes(found) };
        let passes: &[Pass] = if trains { &[Pass::Forward, Pass::Backward] } else { &[Pass::Forward] };
        match sharding {
            Sharding::Params => {
                let each = passes.iter().flat_map(|&pass| has_rows().map(move |mb| (pass, mb)));
                each.map(gather).try_for_each(check)?;
            }
            Sharding::KeptParams => {
                // Whichever microbatch comes first: the members of a group do it for the same.
                let is_done = |pass: Pass| has_rows().any(|mb| summed.contains(&gather((pass, mb))));
                let missing = kept_passes(program.call).iter().find(|&&pass| !is_done(pass));
                missing.and_then(|&pass| Some((pass, has_rows().next()?))).map(gather).map_or(Ok(()), check)?;
            }
            Sharding::None | Sharding::Optimizer | Sharding::Gradients => {}
        }
        if !trains {
            continue;
        }
        if sharding < Sharding::Gradients {
            check(Action::AllReduce { group, bucket, bytes })?;
            continue;
        }
        for mb in has_rows() {
            check(Action::ReduceScatter { group, bucket, mb, bytes })?;
        }
    }
    Ok(())
}

/// Before whose first computation Params are gathered that stay whole: a call in halves lets go of them in between.
fn kept_passes(call: Call) -> &'static [Pass] {
    if call == Call::Halves { &[Pass::Forward, Pass::Backward] } else { &[Pass::Forward] }
}

/// The size of a bucket's parts, in the type in which they are gathered.
fn gathered_bytes(bucket: &Bucket) -> u64 {
    bucket.parts.iter().fold(0, |sum: u64, &part| sum.saturating_add(part)).saturating_mul(bucket.gathered.bytes())
}

fn actions(own: &RankProgram) -> impl Iterator<Item = &Action> {
    own.forward.iter().chain(&own.backward)
}
