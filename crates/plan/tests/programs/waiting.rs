//! Devices that load a kernel wait before they compute for all kernels that run on them, messages included: ranks wait for
//! each other then where messages are kernels, and never where they go by way of hosts and sums come last.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use rannc_plan::{Action, BatchKind, Call, Pass, Payload, Program, RankProgram, ScheduleKind};

use crate::cases::{Given, cases};

/// How messages and exchanges go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// As kernels that run until their peers come.
    Devices,
    /// Without any; and sums of whole buckets start at the end.
    Hosts,
}

/// What several ranks do together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Joint {
    Message { src: u32, dst: u32, stages: Option<(u32, u32)>, number: usize },
    Exchange(BatchKind, u32),
    AllReduce(u32),
    ReduceScatter(u32, u32),
    AllGather(u32, u32, Pass),
}

impl Joint {
    /// Who takes part.
    fn ranks(self, program: &Program, list: List) -> BTreeSet<u32> {
        match self {
            Self::Message { src, dst, .. } => [src, dst].into(),
            Self::Exchange(kind, mb) => {
                let is_it =
                    |action: &Action| matches!(action, Action::Exchange(own) if (own.kind, own.mb) == (kind, mb));
                program.ranks.iter().filter(|own| list(own).iter().any(is_it)).map(|own| own.rank).collect()
            }
            Self::AllReduce(bucket) | Self::ReduceScatter(bucket, _) | Self::AllGather(bucket, ..) => {
                let group = program.buckets[bucket as usize].group;
                program.groups[group as usize].iter().copied().collect()
            }
        }
    }
}

/// From rank to rank, and from Stage to Stage where either has several.
type Ends = (u32, u32, Option<(u32, u32)>);
type List = fn(&RankProgram) -> &Vec<Action>;

/// A rank on its way through a list.
struct Host<'a> {
    rank: u32,
    actions: &'a [Action],
    next: usize,
    begun: BTreeSet<Joint>,
    messages: BTreeMap<Ends, usize>,
    /// What has come in, or is to come, by what waits for it.
    arrivals: Vec<Arrival>,
}

/// What a computation of a microbatch, in this Stage where the rank has several, waits for.
struct Arrival {
    payload: Payload,
    mb: u32,
    stage: Option<u32>,
    joint: Joint,
}

impl<'a> Host<'a> {
    fn new(rank: u32, actions: &'a [Action]) -> Self {
        let (begun, messages) = (BTreeSet::new(), BTreeMap::new());
        Self { rank, actions, next: 0, begun, messages, arrivals: Vec::new() }
    }

    /// Begins what others take part in, and notes what the rank will wait for.
    fn begin(&mut self, action: &Action, by: By) {
        let joint = match action {
            Action::Send(message) => self.message(self.rank, message.peer, message.stages),
            Action::Recv(message) => {
                let joint = self.message(message.peer, self.rank, message.stages);
                let stage = message.stages.map(|(_, to)| to);
                self.arrivals.push(Arrival { payload: message.kind, mb: message.mb, stage, joint });
                joint
            }
            Action::Exchange(exchange) => {
                let joint = Joint::Exchange(exchange.kind, exchange.mb);
                let awaited = match exchange.kind {
                    BatchKind::Input => Some(Payload::Value),
                    BatchKind::OutputGrad => Some(Payload::Grad),
                    BatchKind::Output | BatchKind::InputGrad => None,
                };
                let arrival = |payload| Arrival { payload, mb: exchange.mb, stage: None, joint };
                self.arrivals.extend(awaited.map(arrival));
                joint
            }
            Action::AllReduce { .. } if by == By::Hosts => return,
            Action::AllReduce { bucket, .. } => Joint::AllReduce(*bucket),
            Action::ReduceScatter { bucket, mb, .. } => Joint::ReduceScatter(*bucket, *mb),
            Action::AllGather { bucket, mb, pass, .. } => Joint::AllGather(*bucket, *mb, *pass),
            _ => unreachable!("it computes"),
        };
        self.begun.insert(joint);
    }

    fn message(&mut self, src: u32, dst: u32, stages: Option<(u32, u32)>) -> Joint {
        let number = self.messages.entry((src, dst, stages)).or_default();
        *number += 1;
        Joint::Message { src, dst, stages, number: *number }
    }

    /// What a computation waits for.
    fn awaited(&self, (payload, mb, stage): (Option<Payload>, u32, Option<u32>), by: By) -> Vec<Joint> {
        let is_own = |own: &&Arrival| {
            let is_of_stage = stage.is_none() || own.stage.is_none() || stage == own.stage;
            (Some(own.payload), own.mb) == (payload, mb) && is_of_stage
        };
        let needed = self.arrivals.iter().filter(is_own).map(|own| own.joint);
        let is_kernel =
            |joint: &&Joint| by == By::Devices || !matches!(joint, Joint::Message { .. } | Joint::Exchange(..));
        self.begun.iter().filter(is_kernel).copied().chain(needed).collect()
    }
}

/// What a computation takes, its microbatch and its Stage; `None` for all else.
fn computed(action: &Action) -> Option<(Option<Payload>, u32, Option<u32>)> {
    match action {
        Action::Forward { mb, stage } => Some((Some(Payload::Value), *mb, *stage)),
        Action::Backward { mb, stage } | Action::BackwardInput { mb, stage } => {
            Some((Some(Payload::Grad), *mb, *stage))
        }
        Action::BackwardWeight { mb, stage } => Some((None, *mb, *stage)),
        _ => None,
    }
}

/// The ranks that never come to the end of a list.
fn stuck(program: &Program, list: List, by: By) -> Vec<u32> {
    let mut hosts: Vec<Host<'_>> = program.ranks.iter().map(|own| Host::new(own.rank, list(own))).collect();
    loop {
        let begun: BTreeMap<u32, BTreeSet<Joint>> = hosts.iter().map(|host| (host.rank, host.begun.clone())).collect();
        let has_ended = |joint: &Joint| joint.ranks(program, list).iter().all(|rank| begun[rank].contains(joint));
        let mut moved = false;
        for host in &mut hosts {
            let Some(action) = host.actions.get(host.next) else { continue };
            match computed(action) {
                None => host.begin(action, by),
                Some(own) if host.awaited(own, by).iter().all(has_ended) => {}
                Some(_) => continue,
            }
            host.next += 1;
            moved = true;
        }
        if !moved {
            return hosts.iter().filter(|host| host.next < host.actions.len()).map(|host| host.rank).collect();
        }
    }
}

const LISTS: [List; 2] = [|own| &own.forward, |own| &own.backward];

#[test]
fn ranks_wait_for_each_other_where_messages_are_kernels() {
    let case = Given::chain(&[1, 1], 4, &[4, 4], Call::Whole, ScheduleKind::OneForwardOneBackward);
    let program = case.build();
    assert_eq!(stuck(&program, LISTS[0], By::Devices), [0, 1]);
    assert_eq!(stuck(&program, LISTS[0], By::Hosts), Vec::<u32>::new());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_rank_waits_for_ever_where_messages_go_by_way_of_hosts(case in cases()) {
        let program = case.build();
        for list in LISTS {
            prop_assert_eq!(stuck(&program, list, By::Hosts), Vec::<u32>::new());
        }
    }
}
