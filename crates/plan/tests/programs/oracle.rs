//! Runs a Program on symbols instead of tensors. Rows are told apart by name, so that a row in the wrong
//! place shows. The expected rows are worked out from the case alone.

mod execution;

use std::collections::{BTreeMap, BTreeSet};

use rannc_ir::ValueId;
use rannc_plan::{Action, BatchKind, Call, OutputPart, OutputSource, Pass, Payload, Program};

use self::execution::Execution;
use crate::cases::Given;

/// A row of the global batch: rank and place in its local batch.
type Row = (usize, u64);

/// How something moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Load {
    Sent(Payload),
    Exchanged(BatchKind),
}

/// One row of a Value, or of its gradient from one Stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Token {
    load: Load,
    value: ValueId,
    row: Row,
    /// The Stage that made it.
    stage: usize,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Some ranks never finish.
    Stuck,
    /// A wrong, missing or repeated row, or an Action that cannot be done.
    Wrong(String),
}

fn require(holds: bool, text: impl Fn() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure::Wrong(text())) }
}

fn lengths(rows: u64, parts: u64) -> impl Iterator<Item = u64> {
    (0..parts).map(move |part| (0..rows).filter(|row| row % parts == part).count() as u64)
}

struct Oracle<'a> {
    case: &'a Given,
    program: &'a Program,
    /// Rows of each microbatch in order.
    microbatches: Vec<Vec<Row>>,
    /// By rank: its Stages, and its rows of each microbatch there.
    computes: Vec<BTreeMap<usize, Vec<std::ops::Range<usize>>>>,
}

/// A microbatch of a Stage.
type Computed = (usize, u32);

/// Runs the Program to its end.
pub fn run(case: &Given, program: &Program) -> Result<(), Failure> {
    let oracle = Oracle::new(case, program);
    oracle.check_inputs()?;
    oracle.check_outputs()?;
    Execution::new(&oracle).run()
}

impl<'a> Oracle<'a> {
    fn new(case: &'a Given, program: &'a Program) -> Self {
        let count = case.placement.microbatches as usize;
        let mut microbatches: Vec<Vec<Row>> = vec![Vec::new(); count];
        for (rank, &rows) in case.batch.rows_per_rank.iter().enumerate() {
            let rows = if rank == 0 || case.batch.gather_inputs { rows } else { 0 };
            let mut local = 0..rows;
            for (mb, length) in microbatches.iter_mut().zip(lengths(rows, count as u64)) {
                mb.extend((&mut local).take(length as usize).map(|row| (rank, row)));
            }
        }
        let mut computes = vec![BTreeMap::new(); case.batch.rows_per_rank.len()];
        for (stage, ranks) in case.placement.ranks.iter().enumerate() {
            for (replica, &rank) in ranks.iter().enumerate() {
                let rows_of = |rows: &Vec<Row>| {
                    let lengths: Vec<u64> = lengths(rows.len() as u64, ranks.len() as u64).collect();
                    let start = lengths[..replica].iter().sum::<u64>() as usize;
                    start..start + lengths[replica] as usize
                };
                computes[rank as usize].insert(stage, microbatches.iter().map(rows_of).collect());
            }
        }
        Self { case, program, microbatches, computes }
    }

    /// The rows that a rank computes of a Stage's microbatch.
    fn rows(&self, rank: usize, (stage, mb): Computed) -> &[Row] {
        let own = self.computes[rank].get(&stage).map_or(0..0, |rows| rows[mb as usize].clone());
        &self.microbatches[mb as usize][own]
    }

    /// The Stage that an Action of a rank means: the one that it names, else the only one.
    fn stage(&self, rank: usize, named: Option<u32>) -> usize {
        let mut own = self.computes[rank].keys().copied();
        named.map_or_else(|| own.next().expect("a rank has a stage"), |stage| stage as usize)
    }

    /// All that a rank computes with rows.
    fn all_of(&self, rank: usize) -> impl Iterator<Item = Computed> {
        let mbs = || 0..self.microbatches.len() as u32;
        let all = self.computes[rank].keys().flat_map(move |&stage| mbs().map(move |mb| (stage, mb)));
        all.filter(move |&own| !self.rows(rank, own).is_empty())
    }

    fn takes(&self, stage: usize, input: ValueId) -> bool {
        self.case.partition.stages[stage].inputs.iter().any(|own| own.value == input)
    }

    /// What a rank computes first with an input.
    fn first_forward(&self, rank: usize, input: ValueId) -> Option<Computed> {
        self.program.ranks[rank].forward.iter().find_map(|action| match action {
            Action::Forward { mb, stage } => {
                Some((self.stage(rank, *stage), *mb)).filter(|own| self.takes(own.0, input))
            }
            _ => None,
        })
    }

    /// The Stage that makes a Value that is an output.
    fn maker(&self, output: ValueId) -> Option<usize> {
        let own = self.case.partition.outputs.iter().find(|own| own.value == output)?;
        if let OutputSource::Stage(stage) = own.source { Some(stage as usize) } else { None }
    }

    fn is_whole(&self, value: ValueId) -> bool {
        let mut inputs = self.case.partition.stages.iter().flat_map(|stage| &stage.inputs);
        inputs.any(|input| input.value == value && !input.has_rows)
    }

    /// From the computations of which kind on a Param that stays whole is whole for computations of a kind.
    fn kept_from(&self, pass: Pass) -> Pass {
        if self.case.call == Call::Halves { pass } else { Pass::Forward }
    }

    /// The ranks whose lists have an exchange.
    fn members(&self, kind: BatchKind, mb: u32) -> Vec<usize> {
        let is_it = |action: &Action| matches!(action, Action::Exchange(own) if (own.kind, own.mb) == (kind, mb));
        let ranks = self.program.ranks.iter().enumerate();
        ranks.filter(|(_, own)| own.forward.iter().chain(&own.backward).any(is_it)).map(|(rank, _)| rank).collect()
    }

    /// What a rank must have been sent of a Stage's inputs for a forward, without what it has itself.
    fn inputs_sent_to(&self, rank: usize, own: Computed) -> Vec<Token> {
        let mut tokens = Vec::new();
        for input in &self.case.partition.stages[own.0].inputs {
            let owner = |row: &Row| if input.has_rows { row.0 } else { 0 };
            let comes = input.has_rows || self.first_forward(rank, input.value) == Some(own);
            let rows = self.rows(rank, own).iter().filter(|row| comes && owner(row) != rank);
            tokens.extend(rows.map(|&row| Token {
                load: Load::Exchanged(BatchKind::Input),
                value: input.value,
                row,
                stage: 0,
            }));
        }
        tokens
    }

    /// What a rank must have been sent of the gradients of a Stage's outputs for a backward.
    fn output_grads_sent_to(&self, rank: usize, own: Computed) -> Vec<Token> {
        let comes = self.case.call == Call::Halves && self.case.batch.gather_inputs;
        let rows: Vec<Row> = self.rows(rank, own).iter().copied().filter(|row| comes && row.0 != rank).collect();
        let values = self.outputs_of(own.0, |output| output.requires_grad);
        let token = |value| {
            rows.iter()
                .map(move |&row| Token { load: Load::Exchanged(BatchKind::OutputGrad), value, row, stage: 0 })
                .collect::<Vec<_>>()
        };
        values.into_iter().flat_map(token).collect()
    }

    /// The outputs with rows that a Stage makes, each once.
    fn outputs_of(&self, stage: usize, also: impl Fn(&OutputPart) -> bool) -> BTreeSet<ValueId> {
        let own = |output: &&OutputPart| output.source == OutputSource::Stage(stage as u32) && output.row_dim.is_some();
        self.case
            .partition
            .outputs
            .iter()
            .filter(own)
            .filter(|output| also(output))
            .map(|output| output.value)
            .collect()
    }

    /// What comes to a rank's own batch from others in the end. Gradients of what several seats of a rank use come once.
    fn owed_to(&self, rank: usize) -> Vec<Token> {
        let mut tokens = Vec::new();
        for maker in (0..self.computes.len()).filter(|&maker| maker != rank) {
            let mut grads: BTreeSet<(ValueId, Row)> = BTreeSet::new();
            for own in self.all_of(maker) {
                let is_mine = |row: &&Row| !self.case.batch.gather_inputs || row.0 == rank;
                let outputs = self.outputs_of(own.0, |_| true);
                tokens.extend(outputs.iter().flat_map(|&value| {
                    let rows = self.rows(maker, own).iter().filter(is_mine);
                    rows.map(move |&row| Token { load: Load::Exchanged(BatchKind::Output), value, row, stage: own.0 })
                }));
                let inputs = &self.case.partition.stages[own.0].inputs;
                let input = |token: &Token| inputs.iter().find(|input| input.value == token.value).expect("its own");
                let mine = |token: &Token| if input(token).has_rows { token.row.0 == rank } else { rank == 0 };
                let sent = self.inputs_sent_to(maker, own).into_iter().filter(|_| self.case.call.trains());
                let sent = sent.filter(|token| input(token).requires_grad && mine(token));
                grads.extend(sent.map(|token| (token.value, token.row)));
            }
            let load = Load::Exchanged(BatchKind::InputGrad);
            tokens.extend(grads.into_iter().map(|(value, row)| Token { load, value, row, stage: 0 }));
        }
        tokens
    }

    fn row(&self, mb: u32, place: u64) -> Result<Row, Failure> {
        let rows = self.microbatches.get(mb as usize).and_then(|rows| rows.get(place as usize));
        rows.copied().ok_or_else(|| Failure::Wrong(format!("microbatch {mb} has no row {place}")))
    }

    fn check_inputs(&self) -> Result<(), Failure> {
        let mut arrived: BTreeMap<(ValueId, u32), Vec<Row>> = BTreeMap::new();
        for transfer in &self.program.inputs {
            let rows = arrived.entry((transfer.value, transfer.dst)).or_default();
            for place in transfer.rows.lo..transfer.rows.hi {
                rows.push(self.row(transfer.mb, place)?);
            }
            let from = self.is_whole(transfer.value).then_some(0);
            let owned = (transfer.rows.lo..transfer.rows.hi)
                .all(|place| self.row(transfer.mb, place).is_ok_and(|(rank, _)| rank == transfer.src as usize));
            require(from.map_or(owned, |rank: u32| rank == transfer.src), || format!("{transfer:?} from elsewhere"))?;
        }
        for rank in 0..self.computes.len() {
            let mut needed: BTreeMap<ValueId, BTreeSet<Row>> = BTreeMap::new();
            for own in self.all_of(rank) {
                for input in &self.case.partition.stages[own.0].inputs {
                    if input.has_rows || self.first_forward(rank, input.value) == Some(own) {
                        needed.entry(input.value).or_default().extend(self.rows(rank, own));
                    }
                }
            }
            for (input, expected) in needed {
                let mut got = arrived.remove(&(input, rank as u32)).unwrap_or_default();
                got.sort_unstable();
                require(got.iter().eq(&expected), || format!("rank {rank}, input {input}: {got:?}"))?;
            }
        }
        require(arrived.is_empty(), || format!("inputs for nobody: {arrived:?}"))
    }

    fn check_outputs(&self) -> Result<(), Failure> {
        let gather = self.case.batch.gather_inputs;
        let mut arrived: BTreeMap<(ValueId, usize), Vec<(u64, Row)>> = BTreeMap::new();
        for transfer in &self.program.outputs {
            let output = self.case.partition.outputs.iter().find(|output| output.value == transfer.value);
            let source = output.ok_or_else(|| Failure::Wrong("an output that is none".into()))?.source;
            let (src, dst) = (transfer.src as usize, transfer.dst as usize);
            for place in transfer.rows.lo..transfer.rows.hi {
                let row = self.row(transfer.mb, place)?;
                let has = match source {
                    OutputSource::Stage(stage) => self.rows(src, (stage as usize, transfer.mb)).contains(&row),
                    OutputSource::Input(_) => row.0 == src,
                };
                require(has, || format!("{transfer:?} is not there"))?;
                let slices = &self.program.slices[if gather { dst } else { 0 }];
                let slice = slices.iter().find(|slice| slice.mb == transfer.mb);
                let local = slice.map(|slice| (slice.local.lo + place).wrapping_sub(slice.at)).unwrap_or_default();
                arrived.entry((transfer.value, dst)).or_default().push((local, row));
            }
        }
        for output in self.case.partition.outputs.iter().filter(|output| output.row_dim.is_some()) {
            for (rank, &rows) in self.case.batch.rows_per_rank.iter().enumerate() {
                let (owner, rows) = if gather { (rank, rows) } else { (0, self.case.batch.rows_per_rank[0]) };
                let expected: Vec<(u64, Row)> = (0..rows).map(|row| (row, (owner, row))).collect();
                let mut got = arrived.get(&(output.value, rank)).cloned().unwrap_or_default();
                got.sort_unstable();
                require(got == expected, || format!("rank {rank}, output {}: {got:?}", output.value))?;
            }
        }
        let known =
            |value| self.case.partition.outputs.iter().any(|output| output.value == value && output.row_dim.is_some());
        require(arrived.keys().all(|&(value, _)| known(value)), || "an output without rows travels".into())
    }
}
