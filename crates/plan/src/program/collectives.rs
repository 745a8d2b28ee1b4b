//! What ranks do together with their buckets, and the places of that among a rank's Actions.

use super::action::Action;
use super::buckets::{Bucket, Buckets};
use crate::saver::Sharding;
use crate::schedule::Compute;

/// What one rank does with its buckets.
#[derive(Clone, Debug)]
pub(super) struct Collectives<'a> {
    /// Of the Stage's own Params, with their places.
    own: Vec<(u32, &'a Bucket)>,
    /// Of Params that other Stages hold too.
    late: Vec<(u32, &'a Bucket)>,
    /// The Stage's computations in their order, also those of which the rank has no rows.
    order: &'a [Compute],
}

impl<'a> Collectives<'a> {
    /// Those of a rank whose Stage's ranks are group `stage`.
    pub(super) fn of(buckets: &'a Buckets, rank: u32, stage: u32, order: &'a [Compute]) -> Self {
        let shared = (0..).zip(&buckets.buckets).filter(|(_, bucket)| {
            let ranks = &buckets.groups[bucket.group as usize];
            ranks.len() > 1 && ranks.binary_search(&rank).is_ok()
        });
        let (own, late) = shared.partition(|(_, bucket)| bucket.group == stage);
        Self { own, late, order }
    }

    /// Puts the sums of gradients into a list with all of the rank's backwards.
    ///
    /// The members of a group must come to its collectives in one order. So a rank without rows of a microbatch does its
    /// part where the others do theirs, and sums of whole buckets stand where the last microbatch divides others.
    pub(super) fn within(&self, actions: Vec<Action>) -> Vec<Action> {
        let is_backward = |compute: &Compute| matches!(compute, Compute::Backward(_));
        let rest = actions.iter().filter_map(computation).filter(is_backward).last();
        let divides = self.own.iter().any(|(_, bucket)| bucket.sharding >= Sharding::Gradients);
        let last = if divides { self.order.iter().copied().filter(is_backward).last() } else { rest };
        let mut coming = self.order.iter().copied();
        let mut found = Vec::with_capacity(actions.len());
        for action in actions {
            if let Some(own) = computation(&action) {
                for compute in coming.by_ref() {
                    self.before(compute, last, &mut found);
                    if compute == own {
                        break;
                    }
                }
            }
            found.push(action);
        }
        coming.for_each(|compute| self.before(compute, last, &mut found));
        if last.is_none() {
            found.extend(self.own.iter().map(|&own| all_reduce(own)));
        }
        found.extend(self.late.iter().map(|&late| all_reduce(late)));
        found
    }

    /// What stands before a computation, and what before the `last` backward.
    fn before(&self, compute: Compute, last: Option<Compute>, actions: &mut Vec<Action>) {
        let Compute::Backward(mb) = compute else { return };
        for &(number, bucket) in &self.own {
            if bucket.sharding >= Sharding::Gradients {
                let &Bucket { group, bytes, .. } = bucket;
                actions.push(Action::ReduceScatter { group, bucket: number, mb, bytes });
            } else if last == Some(compute) {
                actions.push(all_reduce((number, bucket)));
            }
        }
    }
}

fn all_reduce((number, bucket): (u32, &Bucket)) -> Action {
    Action::AllReduce { group: bucket.group, bucket: number, bytes: bucket.bytes }
}

fn computation(action: &Action) -> Option<Compute> {
    match *action {
        Action::Forward { mb } => Some(Compute::Forward(mb)),
        Action::Backward { mb } => Some(Compute::Backward(mb)),
        _ => None,
    }
}
