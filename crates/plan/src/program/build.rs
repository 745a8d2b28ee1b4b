//! Builds the Program of a batch.
//!
//! It depends on the batch only through the number of rows of each rank, so it is built anew when
//! those change and kept otherwise.

use std::collections::{BTreeSet, HashMap};

use rannc_ir::ValueId;
use thiserror::Error;

use super::action::Exchange;
use super::batch::BatchRoutes;
use super::buckets::{Bucket, Buckets, stage_groups};
use super::collectives::Collectives;
use super::messages::{Mailbox, mailboxes};
use super::routes::{BatchSplit, Interval, overlaps, split_even};
use super::{Program, RankProgram, Seat, Transfer};
use crate::consistent::{PlanFault, check_ranks};
use crate::partition::{InputPart, OutputSource, Partition};
use crate::plan::Placement;
use crate::schedule::{Call, Crew, Order, Seated};

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
    /// The buckets were divided for other ranks.
    #[error("the gradients' buckets are those of other stages than the plan's")]
    Buckets,
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

/// Builds the Program of a batch. Under a Schedule with a name the result passes [`check`](crate::check()).
///
/// # Errors
/// When the arguments contradict each other, or the batch is empty.
pub fn build(
    placement: &Placement,
    partition: &Partition,
    buckets: &Buckets,
    batch: &Batch,
    call: Call,
) -> Result<Program, ProgramError> {
    let total_rows = check_arguments(placement, partition, batch)?;
    check_buckets(placement, buckets)?;
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
    let router = Router::new(placement, partition, buckets, &split, &stage_rows);
    let orders = router.orders();
    let (inputs, outputs) = (router.inputs(&orders), router.outputs(batch.gather_inputs));
    let mut mailboxes = mailboxes(placement, partition, &stage_rows, call);
    let last = split.microbatches.iter().rposition(|&rows| rows > 0).map_or(0, rank_number);
    let routes =
        BatchRoutes { partition, call, gather_inputs: batch.gather_inputs, inputs: &inputs, outputs: &outputs, last };
    let exchanges = routes.exchanges(batch.rows_per_rank.len());
    let ranks = router.ranks(call, &mut mailboxes, exchanges, &orders);
    let BatchSplit { microbatches, slices, .. } = split;
    let Buckets { groups, buckets, .. } = buckets.clone();
    Ok(Program {
        call,
        gather_inputs: batch.gather_inputs,
        total_rows,
        microbatches,
        slices,
        stage_rows,
        inputs,
        outputs,
        groups,
        buckets,
        ranks,
    })
}

/// Checks all that indexing relies on, and sums the batch's rows.
fn check_arguments(placement: &Placement, partition: &Partition, batch: &Batch) -> Result<u64, ProgramError> {
    let known: BTreeSet<&u32> = placement.ranks.iter().flatten().collect();
    let (plan, given) = (known.len(), batch.rows_per_rank.len());
    let world_size =
        u32::try_from(given).ok().filter(|_| plan == given).ok_or(ProgramError::WorldSize { plan, given })?;
    if placement.microbatches == 0 {
        return Err(ProgramError::Placement(PlanFault::NoMicrobatches));
    }
    check_ranks(&placement.ranks, &placement.sharding, world_size).map_err(ProgramError::Placement)?;
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

/// Checks that the buckets are of these Stages.
fn check_buckets(placement: &Placement, buckets: &Buckets) -> Result<(), ProgramError> {
    let known = |bucket: &Bucket| (bucket.group as usize) < buckets.groups.len();
    let fits = buckets.groups.starts_with(&stage_groups(&placement.ranks)) && buckets.buckets.iter().all(known);
    if fits { Ok(()) } else { Err(ProgramError::Buckets) }
}

/// Everything that routes are derived from.
struct Router<'a> {
    placement: &'a Placement,
    partition: &'a Partition,
    buckets: &'a Buckets,
    split: &'a BatchSplit,
    stage_rows: &'a [Vec<Vec<Interval>>],
    crews: Vec<Crew>,
    /// By rank, the place of its crew.
    crew_of: HashMap<u32, usize>,
    /// By Stage and rank, the place of the Replica.
    replicas: HashMap<(u32, u32), usize>,
}

impl<'a> Router<'a> {
    fn new(
        placement: &'a Placement,
        partition: &'a Partition,
        buckets: &'a Buckets,
        split: &'a BatchSplit,
        stage_rows: &'a [Vec<Vec<Interval>>],
    ) -> Self {
        let crews = Crew::of_stages(&placement.ranks);
        let places =
            crews.iter().enumerate().flat_map(|(place, crew)| crew.ranks.iter().map(move |&rank| (rank, place)));
        let crew_of = places.collect();
        let stages = (0..).zip(&placement.ranks);
        let replicas =
            stages.flat_map(|(stage, ranks)| (0..).zip(ranks).map(move |(place, &rank)| ((stage, rank), place)));
        let replicas = replicas.collect();
        Self { placement, partition, buckets, split, stage_rows, crews, crew_of, replicas }
    }

    fn microbatches(&self) -> impl Iterator<Item = (u32, usize)> + use<> {
        (0..).zip(0..self.split.microbatches.len())
    }

    /// By crew, its computations of the microbatches that have rows.
    fn orders(&self) -> Vec<Vec<Seated>> {
        let active: Vec<u32> =
            self.microbatches().filter(|&(_, index)| self.split.microbatches[index] > 0).map(|(mb, _)| mb).collect();
        let edges: Vec<(usize, usize)> = self.partition.edges().collect();
        let orders = self.placement.schedule.orders(&self.placement.ranks, &edges, rank_number(active.len()));
        let of_active = |Seated { compute, stage }: Seated| Seated {
            compute: compute.map_microbatch(|nth| active[nth as usize]),
            stage,
        };
        orders.into_iter().map(|Order(order)| order.into_iter().map(of_active).collect()).collect()
    }

    /// The rows that a rank computes of a Stage's microbatch; none where it does not have the Stage.
    fn rows(&self, stage: u32, rank: u32, mb: u32) -> Interval {
        let replica = self.replicas.get(&(stage, rank));
        replica.map_or_else(Interval::default, |&replica| self.stage_rows[stage as usize][mb as usize][replica])
    }

    /// The Stage of one of a rank's computations.
    fn stage(&self, rank: u32, seated: &Seated) -> u32 {
        seated.stage.unwrap_or_else(|| self.crews[self.crew_of[&rank]].stages[0])
    }

    /// True when a rank computes rows there.
    fn has_rows(&self, rank: u32, seated: &Seated) -> bool {
        !self.rows(self.stage(rank, seated), rank, seated.compute.microbatch()).is_empty()
    }

    /// True when a Stage uses an input.
    fn takes(&self, stage: u32, input: &InputPart) -> bool {
        self.partition.stages[stage as usize].inputs.iter().any(|own| own.value == input.value)
    }

    fn inputs(&self, orders: &[Vec<Seated>]) -> Vec<Transfer> {
        let mut transfers = self.whole_inputs(orders);
        for (mb, index) in self.microbatches() {
            for (stage, part) in (0..).zip(&self.partition.stages) {
                if !part.inputs.iter().any(|input| input.has_rows) {
                    continue;
                }
                for overlap in overlaps(&self.split.owners[index], &self.stage_rows[stage as usize][index]) {
                    let src = rank_number(overlap.from);
                    let dst = self.placement.ranks[stage as usize][overlap.to];
                    for input in part.inputs.iter().filter(|input| input.has_rows) {
                        let rows = overlap.rows.without(self.taken_before(stage, dst, mb, input));
                        transfers.extend(rows.into_iter().map(|rows| Transfer {
                            src,
                            dst,
                            mb,
                            value: input.value,
                            rows,
                        }));
                    }
                }
            }
        }
        transfers
    }

    /// The rows of an input that a rank gets for its Stages before this one.
    fn taken_before(&self, stage: u32, rank: u32, mb: u32, input: &InputPart) -> impl Iterator<Item = Interval> {
        let before = self.crews[self.crew_of[&rank]].stages.iter().copied().take_while(move |&other| other < stage);
        before.filter(|&other| self.takes(other, input)).map(move |other| self.rows(other, rank, mb))
    }

    /// What has no rows goes to a rank once, for the first of its computations with it.
    fn whole_inputs(&self, orders: &[Vec<Seated>]) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (stage, part) in (0..).zip(&self.partition.stages) {
            for &dst in &self.placement.ranks[stage as usize] {
                let computed = orders[self.crew_of[&dst]].iter().filter(|seated| self.has_rows(dst, seated));
                for input in part.inputs.iter().filter(|input| !input.has_rows) {
                    let first = computed.clone().find(|seated| self.takes(self.stage(dst, seated), input));
                    let Some(first) = first.filter(|seated| self.stage(dst, seated) == stage) else { continue };
                    let mb = first.compute.microbatch();
                    let rows = self.rows(stage, dst, mb);
                    transfers.push(Transfer { src: 0, dst, mb, value: input.value, rows });
                }
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

    fn ranks(
        &self,
        call: Call,
        mailboxes: &mut [Mailbox],
        exchanges: Vec<Vec<Exchange>>,
        orders: &[Vec<Seated>],
    ) -> Vec<RankProgram> {
        let stage_groups = stage_groups(&self.placement.ranks).len();
        let program = |((rank, mailbox), exchanges): ((u32, &mut Mailbox), Vec<Exchange>)| {
            let place = self.crew_of[&rank];
            let computes: Vec<Seated> =
                orders[place].iter().filter(|seated| self.has_rows(rank, seated)).copied().collect();
            let collectives = Collectives::of(self.buckets, rank, stage_groups, &orders[place]);
            let (forward, backward) = mailbox.lists(call, &computes, exchanges, &collectives);
            let seat = |&stage: &u32| Seat { stage, replica: rank_number(self.replicas[&(stage, rank)]) };
            RankProgram { rank, seats: self.crews[place].stages.iter().map(seat).collect(), forward, backward }
        };
        (0..).zip(mailboxes).zip(exchanges).map(program).collect()
    }
}

fn rank_number(index: usize) -> u32 {
    u32::try_from(index).expect("the number of ranks was checked to fit")
}
