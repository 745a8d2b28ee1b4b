//! What ranks do together with their buckets, and the places of that among a rank's Actions.

use super::action::{Action, Pass};
use super::buckets::{Bucket, Buckets};
use crate::saver::Sharding;
use crate::schedule::{Compute, Seated};

/// What one rank does with its buckets.
#[derive(Clone, Debug)]
pub(super) struct Collectives<'a> {
    /// Of Params that all ranks of some Stage hold and no others, with their places.
    own: Vec<(u32, &'a Bucket)>,
    /// Of Params that other Stages hold too.
    late: Vec<(u32, &'a Bucket)>,
    /// The computations of the rank's Stages in their order, also those of which the rank has no rows.
    order: &'a [Seated],
}

impl<'a> Collectives<'a> {
    /// Those of a rank; the ranks of Stages are the first `stage_groups` of the groups.
    pub(super) fn of(buckets: &'a Buckets, rank: u32, stage_groups: usize, order: &'a [Seated]) -> Self {
        let shared = (0..).zip(&buckets.buckets).filter(|(_, bucket)| {
            let ranks = &buckets.groups[bucket.group as usize];
            ranks.len() > 1 && ranks.binary_search(&rank).is_ok()
        });
        let (own, late) = shared.partition(|(_, bucket)| (bucket.group as usize) < stage_groups);
        Self { own, late, order }
    }

    /// Puts what ranks do together into a list of Actions with some of the rank's computations, and where it has all
    /// backwards of a batch, the sums of gradients.
    ///
    /// The members of a group must come to its collectives in one order. So a rank without rows of a microbatch does its
    /// part where the others do theirs, and sums of whole buckets stand where the last microbatch divides others.
    pub(super) fn within(
        &self,
        actions: Vec<Action>,
        is_listed: impl Fn(&Seated) -> bool,
        has_backwards: bool,
    ) -> Vec<Action> {
        let fills = |seated: &Seated| seated.compute.ends_microbatch();
        let rest = actions.iter().filter_map(Action::computed).rfind(fills);
        let divides = self.own.iter().any(|(_, bucket)| bucket.sharding >= Sharding::Gradients);
        let last = if divides { self.order.iter().copied().rfind(fills) } else { rest };
        let mut coming = self.order.iter().copied().filter(is_listed).peekable();
        let first = coming.peek().copied();
        let mut found = Vec::with_capacity(actions.len());
        for action in actions {
            if let Some(own) = action.computed() {
                for compute in coming.by_ref() {
                    self.before(compute, [first, last], &mut found);
                    if compute == own {
                        break;
                    }
                }
            }
            found.push(action);
        }
        coming.for_each(|compute| self.before(compute, [first, last], &mut found));
        if has_backwards {
            let own = self.own.iter().filter(|_| last.is_none());
            found.extend(own.chain(&self.late).map(|&bucket| all_reduce(bucket)));
        }
        found
    }

    /// What stands before a computation, before the first of a list, and before the last that adds to gradients.
    ///
    /// A rank without rows starts its part of a microbatch's sums at once, and before it gathers: the others wait for
    /// some of these sums before they have gathered all. Sums of whole buckets follow, which nobody waits for so early.
    fn before(&self, seated: Seated, [first, last]: [Option<Seated>; 2], actions: &mut Vec<Action>) {
        if let Compute::Backward(mb) = seated.compute {
            actions.extend(self.divided(true).map(|&(number, &Bucket { group, bytes, .. })| Action::ReduceScatter {
                group,
                bucket: number,
                mb,
                bytes,
            }));
        }
        actions.extend(self.gathers(seated.compute, first == Some(seated)));
        if last == Some(seated) {
            actions.extend(self.divided(false).map(|&bucket| all_reduce(bucket)));
        }
    }

    /// Own buckets whose sums are divided among the members, or are not.
    fn divided(&self, is_divided: bool) -> impl Iterator<Item = &(u32, &'a Bucket)> {
        self.own.iter().filter(move |(_, bucket)| (bucket.sharding >= Sharding::Gradients) == is_divided)
    }

    /// In the order in which a computation comes to the Spans; for the first of a list also what stays whole from then on.
    fn gathers(&self, compute: Compute, is_first: bool) -> Vec<Action> {
        let is_due =
            |sharding: Sharding| sharding == Sharding::Params || (is_first && sharding == Sharding::KeptParams);
        let mut gathered: Vec<(u32, &Bucket)> =
            self.own.iter().copied().filter(|(_, bucket)| is_due(bucket.sharding)).collect();
        gathered.sort_by_key(|(_, bucket)| std::cmp::Reverse(bucket.span));
        let (mb, pass) = match compute {
            Compute::Forward(mb) => (mb, Pass::Forward),
            Compute::Backward(mb) | Compute::BackwardInput(mb) => (mb, Pass::Backward),
            Compute::BackwardWeight(_) => return Vec::new(),
        };
        if pass == Pass::Forward {
            gathered.reverse();
        }
        let gather = |(number, bucket): (u32, &Bucket)| Action::AllGather {
            group: bucket.group,
            bucket: number,
            mb,
            pass,
            bytes: bucket.gathered_bytes(),
        };
        gathered.into_iter().map(gather).collect()
    }
}

fn all_reduce((number, bucket): (u32, &Bucket)) -> Action {
    Action::AllReduce { group: bucket.group, bucket: number, bytes: bucket.bytes }
}
