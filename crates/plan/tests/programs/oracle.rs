//! Runs a Program on symbols instead of tensors. Rows are told apart by name, so that a row in the wrong
//! place shows. The expected rows are worked out from the case alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rannc_ir::{ParamId, ValueId};
use rannc_plan::{
    Action, BatchKind, Call, Exchange, Interval, Message, OutputPart, OutputSource, Parcel, Pass, Payload, Piece,
    Program, Sharding,
};

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

/// From which rank to which, and from which Stage to which where that is told.
type Ends = (u32, u32, Option<(u32, u32)>);

/// One direction between two seats.
#[derive(Default)]
struct Pipe {
    under_way: VecDeque<Vec<Token>>,
    sent: usize,
    posted: usize,
}

#[derive(Default)]
struct RankState {
    position: usize,
    /// Recvs begun, in order of posting: sender, message.
    pending: VecDeque<(u32, Message)>,
    /// Has been sent, by what needs it.
    has: BTreeMap<(Payload, Computed), Vec<Token>>,
    /// Has come in exchanges, with what its seats have used of it.
    from_batches: Vec<Token>,
    used: Vec<Token>,
    /// Its exchanges that are not done, in order, with what it gives to whom.
    exchanges: VecDeque<(Exchange, BTreeMap<u32, Vec<Token>>)>,
    /// What has come back to its own batch.
    taken: Vec<Token>,
    forwards: BTreeSet<Computed>,
    backwards: BTreeSet<Computed>,
    /// Backwards of which both parts are done.
    ended: BTreeSet<Computed>,
    /// Its sums that are not done, in order.
    sums: VecDeque<Sum>,
    /// Which microbatch it divided last.
    divided: Option<u32>,
    /// Its gathers that are not done, in order.
    gathers: VecDeque<Gather>,
    /// What it has gathered and not used.
    whole: BTreeSet<Gather>,
    /// Buckets that stay whole, from the computations of which kind on.
    kept: BTreeSet<(u32, Pass)>,
    /// By bucket, the microbatches whose gradients are in it.
    filled: BTreeMap<u32, BTreeSet<Computed>>,
}

/// A gather of a bucket for a computation of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Gather {
    bucket: u32,
    mb: u32,
    pass: Pass,
}

/// A sum that a rank has come to: of a bucket, and of one microbatch where ranks get parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Sum {
    bucket: u32,
    mb: Option<u32>,
}

struct Execution<'a> {
    oracle: &'a Oracle<'a>,
    ranks: Vec<RankState>,
    channels: BTreeMap<Ends, Pipe>,
    /// What has been summed, by Param and microbatch, over which ranks.
    summed: BTreeMap<(ParamId, Option<u32>), Vec<u32>>,
}

impl<'a> Execution<'a> {
    fn new(oracle: &'a Oracle<'a>) -> Self {
        let ranks = oracle.computes.iter().map(|_| RankState::default()).collect();
        Self { oracle, ranks, channels: BTreeMap::new(), summed: BTreeMap::new() }
    }

    fn run(mut self) -> Result<(), Failure> {
        let lists: Vec<Vec<Action>> =
            self.oracle.program.ranks.iter().map(|own| [own.forward.clone(), own.backward.clone()].concat()).collect();
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, list) in lists.iter().enumerate() {
                while let Some(action) = list.get(self.ranks[rank].position) {
                    if !self.step(rank, action)? {
                        break;
                    }
                    self.ranks[rank].position += 1;
                    moved = true;
                }
            }
            moved |= self.sum()? | self.gather_params() | self.exchange()?;
        }
        if (0..lists.len()).any(|rank| self.ranks[rank].position < lists[rank].len()) {
            return Err(Failure::Stuck);
        }
        if self.ranks.iter().any(|state| !state.sums.is_empty() || !state.gathers.is_empty())
            || self.ranks.iter().any(|state| !state.exchanges.is_empty())
        {
            return Err(Failure::Stuck);
        }
        (0..lists.len()).try_for_each(|rank| self.deliver(rank))?;
        self.check_end()?;
        self.check_summed()
    }

    /// The buckets of several ranks, one of them this, in which a Stage's Params are.
    fn buckets_of(&self, rank: usize, stage: usize) -> Vec<u32> {
        let program = self.oracle.program;
        let holds = |members: &Vec<u32>| members.len() > 1 && members.contains(&(rank as u32));
        let buckets = (0..).zip(&program.buckets).filter(|(_, bucket)| holds(&program.groups[bucket.group as usize]));
        buckets.filter(|&(number, _)| self.fills(stage, number)).map(|(number, _)| number).collect()
    }

    fn fills(&self, stage: usize, bucket: u32) -> bool {
        let params = &self.oracle.program.buckets[bucket as usize].params;
        params.iter().any(|param| self.oracle.case.params[param.0 as usize].stages.contains(&(stage as u32)))
    }

    /// What a rank puts into a bucket for a sum.
    fn expected(&self, rank: usize, sum: Sum) -> BTreeSet<Computed> {
        let all = self.oracle.all_of(rank).filter(|&(stage, _)| self.fills(stage, sum.bucket));
        all.filter(|(_, mb)| sum.mb.is_none_or(|own| own == *mb)).collect()
    }

    /// True when a rank has put all into a bucket that it will for this sum.
    fn is_filled(&self, rank: usize, sum: Sum) -> bool {
        self.expected(rank, sum).is_subset(&self.ranks[rank].ended)
    }

    /// Lets the ranks sum, each in its own order; true when any did.
    fn sum(&mut self) -> Result<bool, Failure> {
        let program = self.oracle.program;
        let mut any = false;
        let members = |sum: &Sum| &program.groups[program.buckets[sum.bucket as usize].group as usize];
        let next = |this: &Self, rank: u32| this.ranks[rank as usize].sums.front().copied();
        let ready = |this: &Self, sum: &Sum| {
            let come = |rank: u32| next(this, rank) == Some(*sum) && this.is_filled(rank as usize, *sum);
            members(sum).iter().all(|&rank| come(rank))
        };
        while let Some(sum) =
            (0..self.ranks.len() as u32).filter_map(|rank| next(self, rank)).find(|sum| ready(self, sum))
        {
            any = true;
            for &rank in members(&sum) {
                let expected = self.expected(rank as usize, sum);
                let state = &mut self.ranks[rank as usize];
                state.sums.pop_front();
                let found = state.filled.remove(&sum.bucket).unwrap_or_default();
                require(found == expected, || format!("rank {rank} has {found:?} in bucket {}", sum.bucket))?;
            }
            for param in &program.buckets[sum.bucket as usize].params {
                let again = self.summed.insert((*param, sum.mb), members(&sum).clone()).is_some();
                require(!again, || format!("{param} is summed twice"))?;
            }
        }
        Ok(any)
    }

    /// Demands that every gradient was summed over its holders, and nothing else.
    fn check_summed(&self) -> Result<(), Failure> {
        let case = self.oracle.case;
        let mut expected: BTreeMap<(ParamId, Option<u32>), Vec<u32>> = BTreeMap::new();
        for gradient in case.gradients() {
            if !case.call.trains() || gradient.holders.len() < 2 {
                continue;
            }
            let has_rows = |mb: &u32| !self.oracle.microbatches[*mb as usize].is_empty();
            let each: Vec<Option<u32>> = match gradient.sharding {
                Sharding::None | Sharding::Optimizer => vec![None],
                _ => (0..case.placement.microbatches).filter(has_rows).map(Some).collect(),
            };
            expected.extend(each.into_iter().map(|mb| ((gradient.param, mb), gradient.holders.clone())));
        }
        require(self.summed == expected, || format!("summed are {:?}", self.summed))?;
        let kept_in_vain = |&(_, pass): &(u32, Pass)| self.oracle.kept_from(pass) != pass;
        let in_vain = |state: &RankState| !state.whole.is_empty() || state.kept.iter().any(kept_in_vain);
        require(!self.ranks.iter().any(in_vain), || "parameters that nobody uses".into())?;
        require(self.ranks.iter().all(|state| state.filled.is_empty()), || "gradients that nobody sums".into())
    }

    /// Lets the ranks gather, each in its own order; true when any did.
    fn gather_params(&mut self) -> bool {
        let program = self.oracle.program;
        let members = |gather: &Gather| &program.groups[program.buckets[gather.bucket as usize].group as usize];
        let next = |this: &Self, rank: u32| this.ranks[rank as usize].gathers.front().copied();
        let ready =
            |this: &Self, gather: &Gather| members(gather).iter().all(|&rank| next(this, rank) == Some(*gather));
        let mut any = false;
        while let Some(gather) =
            (0..self.ranks.len() as u32).filter_map(|rank| next(self, rank)).find(|gather| ready(self, gather))
        {
            any = true;
            for &rank in members(&gather) {
                let has_rows = self.oracle.all_of(rank as usize).any(|(_, mb)| mb == gather.mb);
                let state = &mut self.ranks[rank as usize];
                state.gathers.pop_front();
                if program.buckets[gather.bucket as usize].sharding == Sharding::KeptParams {
                    state.kept.insert((gather.bucket, gather.pass));
                } else if has_rows {
                    state.whole.insert(gather);
                }
            }
        }
        any
    }

    /// Comes to a sum; false when it must wait.
    fn gather(&mut self, rank: usize, sum: Sum) -> bool {
        let of_others = sum.mb.is_some() && self.ranks[rank].divided.is_some_and(|before| Some(before) != sum.mb);
        let all: Vec<Sum> = self.ranks[rank].sums.iter().copied().collect();
        // It waits for what it is ready for; of the rest nothing can start before it goes on.
        if of_others && all.first().is_some_and(|&next| self.is_filled(rank, next)) {
            return false;
        }
        let state = &mut self.ranks[rank];
        state.divided = sum.mb.or(state.divided);
        state.sums.push_back(sum);
        true
    }

    fn step(&mut self, rank: usize, action: &Action) -> Result<bool, Failure> {
        self.deliver(rank)?;
        let same = |last: &Gather| match action {
            Action::AllGather { mb, pass, .. } => (last.mb, last.pass) == (*mb, *pass),
            _ => false,
        };
        if self.ranks[rank].gathers.back().is_some_and(|last| !same(last)) {
            return Ok(false);
        }
        match action {
            Action::Forward { mb, stage } => self.compute(rank, Payload::Value, (self.oracle.stage(rank, *stage), *mb)),
            Action::Backward { mb, stage } => {
                let own = (self.oracle.stage(rank, *stage), *mb);
                let done = self.compute(rank, Payload::Grad, own)?;
                if done { self.end(rank, own) } else { Ok(false) }
            }
            Action::BackwardInput { mb, stage } => {
                self.compute(rank, Payload::Grad, (self.oracle.stage(rank, *stage), *mb))
            }
            Action::BackwardWeight { mb, stage } => self.end(rank, (self.oracle.stage(rank, *stage), *mb)),
            Action::Exchange(exchange) => self.begin_exchange(rank, exchange),
            Action::Send(message) => self.send(rank, message),
            Action::Recv(message) => {
                self.channels.entry((message.peer, rank as u32, message.stages)).or_default().posted += 1;
                self.ranks[rank].pending.push_back((message.peer, message.clone()));
                Ok(true)
            }
            &Action::AllGather { bucket, mb, pass, .. } => {
                self.ranks[rank].gathers.push_back(Gather { bucket, mb, pass });
                Ok(true)
            }
            Action::AllReduce { bucket, .. } => Ok(self.gather(rank, Sum { bucket: *bucket, mb: None })),
            Action::ReduceScatter { bucket, mb, .. } => Ok(self.gather(rank, Sum { bucket: *bucket, mb: Some(*mb) })),
        }
    }

    /// Unpacks what has arrived, by the receiver's own idea of the packing.
    fn deliver(&mut self, rank: usize) -> Result<(), Failure> {
        let state = &mut self.ranks[rank];
        let mut waiting = VecDeque::new();
        let mut held_up = BTreeSet::new();
        for (sender, message) in std::mem::take(&mut state.pending) {
            let pipe = (sender, rank as u32, message.stages);
            let channel = self.channels.entry(pipe).or_default();
            let Some(tokens) = (!held_up.contains(&pipe)).then(|| channel.under_way.pop_front()).flatten() else {
                held_up.insert(pipe);
                waiting.push_back((sender, message));
                continue;
            };
            let load = Load::Sent(message.kind);
            let tokens = unpacked(self.oracle, load, message.mb, &message.pieces, tokens)?;
            let stage = self.oracle.stage(rank, message.stages.map(|(_, to)| to));
            state.has.entry((message.kind, (stage, message.mb))).or_default().extend(tokens);
        }
        state.pending = waiting;
        Ok(())
    }

    /// Comes to an exchange with what it gives.
    fn begin_exchange(&mut self, rank: usize, exchange: &Exchange) -> Result<bool, Failure> {
        let &Exchange { kind, mb, ref sends, .. } = exchange;
        let state = &self.ranks[rank];
        let mut given: BTreeMap<u32, Vec<Token>> = BTreeMap::new();
        for Parcel { peer, pieces } in sends {
            for &Piece { value, rows } in pieces {
                let is_whole = self.oracle.is_whole(value);
                // Gradients of what has no rows count those that the first microbatch here has with it.
                let of = match kind {
                    BatchKind::InputGrad if is_whole => self.oracle.first_forward(rank, value).unwrap_or_default().1,
                    _ => mb,
                };
                let at = |stage: usize, row: &Row| self.oracle.rows(rank, (stage, of)).contains(row);
                let takers = || self.oracle.all_of(rank).filter(|(stage, _)| self.oracle.takes(*stage, value));
                let maker = self.oracle.maker(value).unwrap_or_default();
                for place in rows.lo..rows.hi {
                    let row = self.oracle.row(of, place)?;
                    let has = match kind {
                        BatchKind::Input if is_whole => rank == 0,
                        BatchKind::Input | BatchKind::OutputGrad => row.0 == rank,
                        BatchKind::Output => at(maker, &row),
                        BatchKind::InputGrad => takers().any(|(stage, _)| at(stage, &row)),
                    };
                    let done = match kind {
                        BatchKind::Input | BatchKind::OutputGrad => true,
                        BatchKind::Output => state.forwards.contains(&(maker, mb)),
                        BatchKind::InputGrad if is_whole => takers().all(|own| state.backwards.contains(&own)),
                        BatchKind::InputGrad => {
                            let with_row = takers().filter(|own| own.1 == mb && at(own.0, &row));
                            with_row.into_iter().all(|own| state.backwards.contains(&own))
                        }
                    };
                    require(done, || format!("rank {rank} gives what it has not computed"))?;
                    let stage = if kind == BatchKind::Output { maker } else { 0 };
                    require(has, || format!("rank {rank} gives a row that is not its own"))?;
                    given.entry(*peer).or_default().push(Token { load: Load::Exchanged(kind), value, row, stage });
                }
            }
        }
        self.ranks[rank].exchanges.push_back((exchange.clone(), given));
        Ok(true)
    }

    /// Lets the ranks exchange rows, each in its own order and all that take part together; true when any did.
    fn exchange(&mut self) -> Result<bool, Failure> {
        let next = |this: &Self, rank: usize| this.ranks[rank].exchanges.front().map(|(own, _)| (own.kind, own.mb));
        let ready = |this: &Self, &(kind, mb): &(BatchKind, u32)| {
            this.oracle.members(kind, mb).into_iter().all(|rank| next(this, rank) == Some((kind, mb)))
        };
        let mut any = false;
        while let Some((kind, mb)) =
            (0..self.ranks.len()).filter_map(|rank| next(self, rank)).find(|exchange| ready(self, exchange))
        {
            any = true;
            let mut given = BTreeMap::new();
            let mut taken = Vec::new();
            for rank in self.oracle.members(kind, mb) {
                let (own, gives) = self.ranks[rank].exchanges.pop_front().expect("it is next");
                given.extend(gives.into_iter().map(|(peer, tokens)| ((rank as u32, peer), tokens)));
                taken.extend(own.recvs.into_iter().map(|parcel| (rank, parcel)));
            }
            for (rank, Parcel { peer, pieces }) in taken {
                let tokens = given.remove(&(peer, rank as u32)).unwrap_or_default();
                let whole = |piece: &Piece| kind == BatchKind::InputGrad && self.oracle.is_whole(piece.value);
                let first = |piece: &Piece| self.oracle.first_forward(peer as usize, piece.value);
                let of = |piece: &Piece| if whole(piece) { first(piece) } else { None };
                let load = Load::Exchanged(kind);
                let mut tokens = tokens.into_iter();
                for piece in &pieces {
                    let count = (piece.rows.hi - piece.rows.lo) as usize;
                    let of = of(piece).map_or(mb, |(_, first)| first);
                    let own = unpacked(self.oracle, load, of, &[*piece], tokens.by_ref().take(count).collect())?;
                    match kind {
                        BatchKind::Output | BatchKind::InputGrad => self.ranks[rank].taken.extend(own),
                        _ => self.ranks[rank].from_batches.extend(own),
                    }
                }
                require(tokens.next().is_none(), || "a parcel is longer than expected".into())?;
            }
            require(given.is_empty(), || "rows for nobody".into())?;
        }
        Ok(any)
    }

    fn compute(&mut self, rank: usize, payload: Payload, own: Computed) -> Result<bool, Failure> {
        let (oracle, (stage, mb)) = (self.oracle, own);
        let state = &mut self.ranks[rank];
        let of_batch = if payload == Payload::Value { BatchKind::Input } else { BatchKind::OutputGrad };
        let is_exchanging = state.exchanges.iter().any(|(own, _)| (own.kind, own.mb) == (of_batch, mb));
        let stage_of = |message: &Message| oracle.stage(rank, message.stages.map(|(_, to)| to));
        let is_needed = |message: &Message| message.kind == payload && (stage_of(message), message.mb) == own;
        if is_exchanging || state.pending.iter().any(|(_, message)| is_needed(message)) {
            return Ok(false);
        }
        let from_batch = match payload {
            Payload::Value => oracle.inputs_sent_to(rank, own),
            _ => oracle.output_grads_sent_to(rank, own),
        };
        let has_all = from_batch.iter().all(|token| state.from_batches.contains(token));
        require(has_all, || format!("rank {rank} lacks some of {from_batch:?}"))?;
        state.used.extend(from_batch);
        let mut needed = Vec::new();
        for crossing in &oracle.case.partition.crossings {
            for &to in &crossing.to {
                let (from, to) = (crossing.from as usize, to as usize);
                let maker = match payload {
                    Payload::Value if to == stage => from,
                    Payload::Grad if from == stage && crossing.requires_grad => to,
                    _ => continue,
                };
                // What another seat of the rank has made is there.
                let computed = if payload == Payload::Value { &state.forwards } else { &state.backwards };
                let beside = oracle.rows(rank, (maker, mb));
                let there = |row: &Row| computed.contains(&(maker, mb)) && beside.contains(row);
                let rows = oracle.rows(rank, own).iter().filter(|row| !there(row));
                needed.extend(rows.map(|&row| Token {
                    load: Load::Sent(payload),
                    value: crossing.value,
                    row,
                    stage: maker,
                }));
            }
        }
        let mut has = state.has.remove(&(payload, own)).unwrap_or_default();
        let key = |token: &Token| (token.load, token.value, token.stage, token.row);
        needed.sort_unstable_by_key(key);
        has.sort_unstable_by_key(key);
        require(has == needed, || format!("rank {rank} has {has:?} for microbatch {mb}"))?;
        let done = if payload == Payload::Value { &mut state.forwards } else { &mut state.backwards };
        require(done.insert(own), || "computed twice".into())?;
        require(state.forwards.contains(&own), || "backward first".into())?;
        let pass = if payload == Payload::Grad { Pass::Backward } else { Pass::Forward };
        for bucket in self.buckets_of(rank, stage) {
            let whole = self.ranks[rank].whole.remove(&Gather { bucket, mb, pass });
            let is_right = match self.oracle.program.buckets[bucket as usize].sharding {
                Sharding::Params => whole,
                Sharding::KeptParams => self.ranks[rank].kept.contains(&(bucket, self.oracle.kept_from(pass))),
                Sharding::None | Sharding::Optimizer | Sharding::Gradients => !whole,
            };
            require(is_right, || format!("rank {rank} does not have bucket {bucket} whole"))?;
        }
        Ok(true)
    }

    /// Ends a backward, which fills the buckets.
    fn end(&mut self, rank: usize, own: Computed) -> Result<bool, Failure> {
        let state = &mut self.ranks[rank];
        require(state.backwards.contains(&own), || "second part first".into())?;
        require(state.ended.insert(own), || "ended twice".into())?;
        for bucket in self.buckets_of(rank, own.0) {
            self.ranks[rank].filled.entry(bucket).or_default().insert(own);
        }
        Ok(true)
    }

    fn send(&mut self, rank: usize, message: &Message) -> Result<bool, Failure> {
        let state = &self.ranks[rank];
        let channel = self.channels.entry((rank as u32, message.peer, message.stages)).or_default();
        let is_bounded = message.kind == Payload::Grad || !self.oracle.case.call.trains();
        if is_bounded && channel.sent >= channel.posted + 2 {
            return Ok(false);
        }
        let done = if message.kind == Payload::Value { &state.forwards } else { &state.backwards };
        let stage = self.oracle.stage(rank, message.stages.map(|(from, _)| from));
        require(done.contains(&(stage, message.mb)), || format!("rank {rank} sends what it has not computed"))?;
        let own = self.oracle.rows(rank, (stage, message.mb));
        let mut tokens = Vec::new();
        for piece in &message.pieces {
            for place in piece.rows.lo..piece.rows.hi {
                let row = self.oracle.row(message.mb, place)?;
                require(own.contains(&row), || format!("rank {rank} sends a row that is not its own"))?;
                tokens.push(Token { load: Load::Sent(message.kind), value: piece.value, row, stage });
            }
        }
        channel.under_way.push_back(tokens);
        channel.sent += 1;
        Ok(true)
    }

    fn check_end(&self) -> Result<(), Failure> {
        let trains = self.oracle.case.call.trains();
        for (rank, state) in self.ranks.iter().enumerate() {
            let all: BTreeSet<Computed> = self.oracle.all_of(rank).collect();
            let trained = if trains { all.clone() } else { BTreeSet::new() };
            let complete = state.forwards == all && state.backwards == trained && state.ended == trained;
            let is_used = |token: &Token| state.used.contains(token);
            let clean = state.pending.is_empty() && state.has.is_empty() && state.from_batches.iter().all(is_used);
            require(complete && clean, || format!("rank {rank} has not done its work"))?;
            let key = |token: &Token| (token.load, token.value, token.stage, token.row);
            let (mut taken, mut owed) = (state.taken.clone(), self.oracle.owed_to(rank));
            taken.sort_unstable_by_key(key);
            owed.sort_unstable_by_key(key);
            require(taken == owed, || format!("rank {rank} has got {taken:?} for its own batch"))?;
        }
        require(self.channels.values().all(|channel| channel.under_way.is_empty()), || "unread messages".into())
    }
}

/// What has arrived, by the receiver's own idea of the packing.
fn unpacked(
    oracle: &Oracle<'_>,
    load: Load,
    mb: u32,
    pieces: &[Piece],
    tokens: Vec<Token>,
) -> Result<Vec<Token>, Failure> {
    let (mut tokens, mut found) = (tokens.into_iter(), Vec::new());
    for Piece { value, rows: Interval { lo, hi } } in pieces {
        for place in *lo..*hi {
            let (token, row) = (tokens.next(), oracle.row(mb, place)?);
            let right = token.filter(|t| (t.load, t.value, t.row) == (load, *value, row));
            found.push(right.ok_or_else(|| Failure::Wrong(format!("{token:?} is taken for {row:?}")))?);
        }
    }
    require(tokens.next().is_none(), || "a message is longer than expected".into())?;
    Ok(found)
}
