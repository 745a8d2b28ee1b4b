//! Builds the Program of a batch.
//!
//! It depends on the batch only through the number of rows of each rank, so it is built anew when
//! those change and kept otherwise.

use std::collections::BTreeMap;

use rannc_ir::ValueId;
use thiserror::Error;

use crate::parts::{OutputSource, Partition};
use crate::plan::{PlanFault, check_ranks};
use crate::program::{Action, Message, Payload, Piece, Program, RankProgram, Transfer};
use crate::routes::{BatchSplit, Interval, overlaps, split_even};
use crate::schedule::{Call, Compute, ScheduleKind};

/// Where the Replicas of each Stage run, how often, and in which order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// By Stage, the rank of each Replica.
    pub ranks: Vec<Vec<u32>>,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Order of forwards and backwards.
    pub schedule: ScheduleKind,
}

/// The rows that one call gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Rows of each rank's local batch.
    pub rows_per_rank: Vec<u64>,
    /// True when the batch is all ranks' rows together; false when it is rank 0's alone, and every
    /// rank gets all of the output.
    pub gather_inputs: bool,
}

/// Why no Program can be built.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProgramError {
    /// Row counts are not given for each rank.
    #[error("row counts are given for {given} ranks, the plan has {plan}")]
    WorldSize {
        /// Ranks of the plan.
        plan: usize,
        /// Row counts.
        given: usize,
    },
    /// The ranks are not well divided over the Stages.
    #[error("the plan's stages and ranks do not fit together: {0}")]
    Placement(PlanFault),
    /// Plan and Partition have different numbers of Stages.
    #[error("the plan has {plan} stages, the partition {partition}")]
    Stages {
        /// In the plan.
        plan: usize,
        /// In the partition.
        partition: usize,
    },
    /// A Value does not go from a Stage to later ones.
    #[error("{value} goes from stage {from} to stages {to:?} of {stages}; it must go to later stages, in order")]
    Crossing {
        /// The Value.
        value: ValueId,
        /// Its maker.
        from: u32,
        /// Its users.
        to: Vec<u32>,
        /// Number of Stages.
        stages: usize,
    },
    /// An output's maker does not exist.
    #[error("output {value} is made by stage {stage} of {stages}")]
    Output {
        /// The Value.
        value: ValueId,
        /// Its maker.
        stage: u32,
        /// Number of Stages.
        stages: usize,
    },
    /// The batch is empty.
    #[error("the batch has no rows; give at least one row{}", if *.gather_inputs { "" } else { " on rank 0" })]
    NoRows {
        /// As in [`Batch`].
        gather_inputs: bool,
    },
    /// Too many rows to count.
    #[error("the ranks' row counts sum to more than 2^64")]
    TooManyRows,
}

/// Builds the Program of a batch. The result passes [`check`](crate::check()).
pub fn build(placement: &Placement, partition: &Partition, batch: &Batch, call: Call) -> Result<Program, ProgramError> {
    let total_rows = check_arguments(placement, partition, batch)?;
    let mut source_rows = batch.rows_per_rank.clone();
    if !batch.gather_inputs {
        source_rows.iter_mut().skip(1).for_each(|rows| *rows = 0);
    }
    let split = BatchSplit::new(&source_rows, placement.microbatches as usize);
    let stage_rows: Vec<Vec<Vec<Interval>>> = placement
        .ranks
        .iter()
        .map(|ranks| split.microbatches.iter().map(|&rows| split_even(rows, ranks.len())).collect())
        .collect();
    let router = Router { placement, partition, split: &split, stage_rows: &stage_rows };
    let (inputs, outputs) = (router.inputs(), router.outputs(batch.gather_inputs));
    let ranks = router.ranks(call);
    let BatchSplit { microbatches, slices, .. } = split;
    let gather_inputs = batch.gather_inputs;
    Ok(Program { call, gather_inputs, total_rows, microbatches, slices, stage_rows, inputs, outputs, ranks })
}

/// All directed rank pairs between which a message between Stages may go, whatever the batch; sorted.
pub fn plan_channels(placement: &Placement, partition: &Partition) -> Vec<(u32, u32)> {
    let ranks_of = |stage: u32| placement.ranks.get(stage as usize).into_iter().flatten().copied();
    let mut pairs = Vec::new();
    for (from, to) in stage_links(partition).into_keys() {
        for sender in ranks_of(from) {
            pairs.extend(ranks_of(to).flat_map(|receiver| [(sender, receiver), (receiver, sender)]));
        }
    }
    pairs.sort_unstable();
    pairs
}

/// The Values that go directly from one Stage to another, and those of them whose gradients return.
#[derive(Default)]
struct Link {
    values: Vec<ValueId>,
    grads: Vec<ValueId>,
}

fn stage_links(partition: &Partition) -> BTreeMap<(u32, u32), Link> {
    let mut links: BTreeMap<(u32, u32), Link> = BTreeMap::new();
    for crossing in &partition.crossings {
        for &to in &crossing.to {
            let link = links.entry((crossing.from, to)).or_default();
            link.values.push(crossing.value);
            if crossing.requires_grad {
                link.grads.push(crossing.value);
            }
        }
    }
    links
}

/// Checks all that indexing relies on, and sums the batch's rows.
fn check_arguments(placement: &Placement, partition: &Partition, batch: &Batch) -> Result<u64, ProgramError> {
    let (plan, given) = (placement.ranks.iter().map(Vec::len).sum::<usize>(), batch.rows_per_rank.len());
    let world_size =
        u32::try_from(given).ok().filter(|_| plan == given).ok_or(ProgramError::WorldSize { plan, given })?;
    if placement.microbatches == 0 {
        return Err(ProgramError::Placement(PlanFault::NoMicrobatches));
    }
    check_ranks(placement.ranks.iter().map(Vec::as_slice), world_size).map_err(ProgramError::Placement)?;
    let stages = placement.ranks.len();
    if partition.stages.len() != stages {
        return Err(ProgramError::Stages { plan: stages, partition: partition.stages.len() });
    }
    for crossing in &partition.crossings {
        let increasing = std::iter::once(&crossing.from).chain(&crossing.to).is_sorted_by(|a, b| a < b);
        if !increasing || crossing.to.last().is_none_or(|&last| last as usize >= stages) {
            let (value, from, to) = (crossing.value, crossing.from, crossing.to.clone());
            return Err(ProgramError::Crossing { value, from, to, stages });
        }
    }
    for output in &partition.outputs {
        if let OutputSource::Stage(stage) = output.source
            && stage as usize >= stages
        {
            return Err(ProgramError::Output { value: output.value, stage, stages });
        }
    }
    let counted = if batch.gather_inputs { given } else { given.min(1) };
    let total = batch.rows_per_rank[..counted].iter().try_fold(0, |sum: u64, &rows| sum.checked_add(rows));
    match total {
        None => Err(ProgramError::TooManyRows),
        Some(0) => Err(ProgramError::NoRows { gather_inputs: batch.gather_inputs }),
        Some(total) => Ok(total),
    }
}

/// Messages of one rank, by microbatch.
#[derive(Clone)]
struct Mailbox {
    value_recvs: Vec<Vec<Action>>,
    value_sends: Vec<Vec<Action>>,
    grad_recvs: Vec<Vec<Action>>,
    grad_sends: Vec<Vec<Action>>,
}

impl Mailbox {
    fn new(microbatches: usize) -> Self {
        let empty = vec![Vec::new(); microbatches];
        Self { value_recvs: empty.clone(), value_sends: empty.clone(), grad_recvs: empty.clone(), grad_sends: empty }
    }

    fn take_recvs(&mut self, compute: Compute) -> Vec<Action> {
        match compute {
            Compute::Forward(mb) => std::mem::take(&mut self.value_recvs[mb as usize]),
            Compute::Backward(mb) => std::mem::take(&mut self.grad_recvs[mb as usize]),
        }
    }

    fn take_sends(&mut self, compute: Compute) -> Vec<Action> {
        match compute {
            Compute::Forward(mb) => std::mem::take(&mut self.value_sends[mb as usize]),
            Compute::Backward(mb) => std::mem::take(&mut self.grad_sends[mb as usize]),
        }
    }

    /// The computations with their messages: receives one computation ahead, sends right after.
    fn actions(&mut self, computes: &[Compute]) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut coming = computes.iter();
        actions.extend(coming.next().map(|&first| self.take_recvs(first)).unwrap_or_default());
        for &compute in computes {
            actions.extend(coming.next().map(|&next| self.take_recvs(next)).unwrap_or_default());
            actions.push(match compute {
                Compute::Forward(mb) => Action::Forward { mb },
                Compute::Backward(mb) => Action::Backward { mb },
            });
            actions.extend(self.take_sends(compute));
        }
        actions
    }
}

/// Everything that routes are derived from.
struct Router<'a> {
    placement: &'a Placement,
    partition: &'a Partition,
    split: &'a BatchSplit,
    stage_rows: &'a [Vec<Vec<Interval>>],
}

impl Router<'_> {
    fn microbatches(&self) -> impl Iterator<Item = (u32, usize)> + use<> {
        (0..).zip(0..self.split.microbatches.len())
    }

    fn inputs(&self) -> Vec<Transfer> {
        let mut transfers = self.whole_inputs();
        for (mb, index) in self.microbatches() {
            for (stage, part) in self.partition.stages.iter().enumerate() {
                if !part.inputs.iter().any(|input| input.has_rows) {
                    continue;
                }
                for overlap in overlaps(&self.split.owners[index], &self.stage_rows[stage][index]) {
                    let src = rank_number(overlap.from);
                    let dst = self.placement.ranks[stage][overlap.to];
                    let with_rows = part.inputs.iter().filter(|input| input.has_rows);
                    transfers.extend(with_rows.map(|input| Transfer {
                        src,
                        dst,
                        mb,
                        value: input.value,
                        rows: overlap.rows,
                    }));
                }
            }
        }
        transfers
    }

    fn whole_inputs(&self) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (stage, part) in self.partition.stages.iter().enumerate() {
            for (replica, &dst) in self.placement.ranks[stage].iter().enumerate() {
                let rows_of = |index: usize| self.stage_rows[stage][index][replica];
                let Some((mb, index)) = self.microbatches().find(|&(_, index)| !rows_of(index).is_empty()) else {
                    continue;
                };
                let whole = part.inputs.iter().filter(|input| !input.has_rows);
                transfers.extend(whole.map(|input| Transfer {
                    src: 0,
                    dst,
                    mb,
                    value: input.value,
                    rows: rows_of(index),
                }));
            }
        }
        transfers
    }

    fn outputs(&self, gather_inputs: bool) -> Vec<Transfer> {
        let mut sources: Vec<(ValueId, OutputSource)> = Vec::new();
        for output in self.partition.outputs.iter().filter(|output| output.row_dim.is_some()) {
            if !sources.iter().any(|&(value, _)| value == output.value) {
                sources.push((output.value, output.source));
            }
        }
        let all_ranks: Vec<u32> = (0..).take(self.split.slices.len()).collect();
        let mut transfers = Vec::new();
        for (mb, index) in self.microbatches() {
            let owners = &self.split.owners[index];
            for &(value, source) in &sources {
                let (ranks, rows) = match source {
                    OutputSource::Stage(stage) => {
                        (&self.placement.ranks[stage as usize], &self.stage_rows[stage as usize][index])
                    }
                    OutputSource::Input(_) => (&all_ranks, owners),
                };
                if gather_inputs {
                    transfers.extend(overlaps(rows, owners).into_iter().map(|overlap| Transfer {
                        src: ranks[overlap.from],
                        dst: all_ranks[overlap.to],
                        mb,
                        value,
                        rows: overlap.rows,
                    }));
                } else {
                    for (&src, &rows) in ranks.iter().zip(rows).filter(|(_, rows)| !rows.is_empty()) {
                        transfers.extend(all_ranks.iter().map(|&dst| Transfer { src, dst, mb, value, rows }));
                    }
                }
            }
        }
        transfers
    }

    fn ranks(&self, call: Call) -> Vec<RankProgram> {
        let mut mailboxes = self.mailboxes(call);
        let active: Vec<u32> =
            self.microbatches().filter(|&(_, index)| self.split.microbatches[index] > 0).map(|(mb, _)| mb).collect();
        let mut programs = Vec::with_capacity(mailboxes.len());
        for (stage, ranks) in (0..).zip(&self.placement.ranks) {
            let stages = rank_number(self.placement.ranks.len());
            let order = self.placement.schedule.order(stage, stages, rank_number(active.len()));
            let order: Vec<Compute> = order.map(|compute| compute.map_microbatch(|nth| active[nth as usize])).collect();
            for (replica, &rank) in (0..).zip(ranks) {
                let rows = |mb: u32| self.stage_rows[stage as usize][mb as usize][replica as usize];
                let computes: Vec<Compute> =
                    order.iter().copied().filter(|compute| !rows(compute.microbatch()).is_empty()).collect();
                let (forward, backward) = rank_actions(call, &mut mailboxes[rank as usize], &computes);
                programs.push(RankProgram { rank, stage, replica, forward, backward });
            }
        }
        programs.sort_unstable_by_key(|program| program.rank);
        programs
    }

    fn mailboxes(&self, call: Call) -> Vec<Mailbox> {
        let mut mailboxes = vec![Mailbox::new(self.split.microbatches.len()); self.split.slices.len()];
        for ((from, to), link) in stage_links(self.partition) {
            let (from, to) = (from as usize, to as usize);
            for (mb, index) in self.microbatches() {
                for overlap in overlaps(&self.stage_rows[from][index], &self.stage_rows[to][index]) {
                    let maker = self.placement.ranks[from][overlap.from];
                    let user = self.placement.ranks[to][overlap.to];
                    let message = |kind, values: &[ValueId], peer| {
                        let piece = |&value| Piece { value, rows: overlap.rows };
                        Message { mb, peer, kind, pieces: values.iter().map(piece).collect() }
                    };
                    let sent = Action::Send(message(Payload::Value, &link.values, user));
                    mailboxes[maker as usize].value_sends[index].push(sent);
                    let received = Action::Recv(message(Payload::Value, &link.values, maker));
                    mailboxes[user as usize].value_recvs[index].push(received);
                    if call.trains() && !link.grads.is_empty() {
                        let sent = Action::Send(message(Payload::Grad, &link.grads, maker));
                        mailboxes[user as usize].grad_sends[index].push(sent);
                        let received = Action::Recv(message(Payload::Grad, &link.grads, user));
                        mailboxes[maker as usize].grad_recvs[index].push(received);
                    }
                }
            }
        }
        mailboxes
    }
}

/// The forward and the backward list of one rank.
fn rank_actions(call: Call, mailbox: &mut Mailbox, computes: &[Compute]) -> (Vec<Action>, Vec<Action>) {
    let (forwards, backwards): (Vec<Compute>, Vec<Compute>) =
        computes.iter().partition(|compute| matches!(compute, Compute::Forward(_)));
    match call {
        Call::Forward => (mailbox.actions(&forwards), Vec::new()),
        Call::Whole => (ended_by_reduce(mailbox.actions(computes)), Vec::new()),
        Call::Halves => (mailbox.actions(&forwards), ended_by_reduce(mailbox.actions(&backwards))),
    }
}

fn ended_by_reduce(mut actions: Vec<Action>) -> Vec<Action> {
    actions.push(Action::Reduce);
    actions
}

fn rank_number(index: usize) -> u32 {
    u32::try_from(index).expect("the number of ranks was checked to fit")
}
