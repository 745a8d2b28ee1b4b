//! Ranks that carry out a Program with rows by name.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rannc_ir::ParamId;
use rannc_plan::{Action, BatchKind, Exchange, Interval, Message, Parcel, Pass, Payload, Piece, Sharding};

use super::{Computed, Failure, Load, Oracle, Row, Token, require};

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

pub(super) struct Execution<'a> {
    oracle: &'a Oracle<'a>,
    ranks: Vec<RankState>,
    channels: BTreeMap<Ends, Pipe>,
    /// What has been summed, by Param and microbatch, over which ranks.
    summed: BTreeMap<(ParamId, Option<u32>), Vec<u32>>,
}

impl<'a> Execution<'a> {
    pub(super) fn new(oracle: &'a Oracle<'a>) -> Self {
        let ranks = oracle.computes.iter().map(|_| RankState::default()).collect();
        Self { oracle, ranks, channels: BTreeMap::new(), summed: BTreeMap::new() }
    }

    pub(super) fn run(mut self) -> Result<(), Failure> {
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
