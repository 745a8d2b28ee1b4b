//! The checker rejects damaged Programs.

use proptest::prelude::*;
use proptest::sample::Index;
use rannc_ir::{DType, ValueId};
use rannc_plan::{
    Action, BatchKind, Call, CheckError, Crossing, Deadlock, Exchange, Interval, Message, Parcel, Pass, Piece, Program,
    ScheduleKind, Sharding, Transfer,
};

use crate::cases::{Given, Held, ROWS, cases, lone_cases};
use crate::oracle::{self, Failure};

/// A way to break a Program.
#[derive(Clone, Copy, Debug)]
enum Damage {
    DropAction,
    RepeatAction,
    OtherMicrobatch,
    OtherStage,
    DropPiece,
    RepeatPiece,
    ShiftPiece,
    ShrinkPiece,
    OtherPeer,
    DropTransfer,
    RepeatTransfer,
    ShiftTransfer,
    OtherSource,
    OtherDestination,
    DropSlice,
    ShiftSlice,
    MoveSlice,
    ShiftStageRows,
    MoreRows,
    LongerMicrobatch,
    OtherBucket,
    OtherGroup,
    OtherBytes,
    SwapSums,
    EarlySum,
    LateSum,
    OtherSum,
    OtherPass,
    OtherSpan,
    DropParam,
    RepeatParam,
    MoveParam,
    OtherMembers,
    LargerBucket,
}

const DAMAGES: [Damage; 34] = [
    Damage::DropAction,
    Damage::RepeatAction,
    Damage::OtherMicrobatch,
    Damage::OtherStage,
    Damage::DropPiece,
    Damage::RepeatPiece,
    Damage::ShiftPiece,
    Damage::ShrinkPiece,
    Damage::OtherPeer,
    Damage::DropTransfer,
    Damage::RepeatTransfer,
    Damage::ShiftTransfer,
    Damage::OtherSource,
    Damage::OtherDestination,
    Damage::DropSlice,
    Damage::ShiftSlice,
    Damage::MoveSlice,
    Damage::ShiftStageRows,
    Damage::MoreRows,
    Damage::LongerMicrobatch,
    Damage::OtherBucket,
    Damage::OtherGroup,
    Damage::OtherBytes,
    Damage::SwapSums,
    Damage::EarlySum,
    Damage::LateSum,
    Damage::OtherSum,
    Damage::OtherPass,
    Damage::OtherSpan,
    Damage::DropParam,
    Damage::RepeatParam,
    Damage::MoveParam,
    Damage::OtherMembers,
    Damage::LargerBucket,
];

fn lists(program: &mut Program) -> impl Iterator<Item = &mut Vec<Action>> {
    program.ranks.iter_mut().flat_map(|own| [&mut own.forward, &mut own.backward])
}

/// A random element of those that `all` yields; `None` when there is none.
fn pick<T>(all: impl Iterator<Item = T>, at: Index) -> Option<T> {
    let mut all: Vec<T> = all.collect();
    if all.is_empty() { None } else { Some(all.swap_remove(at.index(all.len()))) }
}

/// The peer and the pieces of a message, or of a parcel of an exchange.
fn message(program: &mut Program, at: Index) -> Option<(&mut u32, &mut Vec<Piece>)> {
    let messages = lists(program).flatten().flat_map(|action| match action {
        Action::Send(Message { peer, pieces, .. }) | Action::Recv(Message { peer, pieces, .. }) => vec![(peer, pieces)],
        Action::Exchange(Exchange { sends, recvs, .. }) => {
            sends.iter_mut().chain(recvs).map(|Parcel { peer, pieces }| (peer, pieces)).collect()
        }
        _ => Vec::new(),
    });
    pick(messages, at)
}

fn transfers(program: &mut Program, at: Index) -> Option<&mut Vec<Transfer>> {
    pick([&mut program.inputs, &mut program.outputs].into_iter().filter(|list| !list.is_empty()), at)
}

fn other(rank: u32, world: usize, at: Index) -> Option<u32> {
    pick((0..).take(world).filter(|&candidate| candidate != rank), at)
}

fn shift(rows: &mut Interval) {
    *rows = Interval::new(rows.lo + 1, rows.hi + 1);
}

fn damage_actions(program: &mut Program, damage: Damage, list: Index, place: Index) -> Option<()> {
    let list = pick(lists(program).filter(|list| !list.is_empty()), list)?;
    let at = place.index(list.len());
    match damage {
        Damage::DropAction => {
            list.remove(at);
        }
        Damage::RepeatAction => list.insert(at, list[at].clone()),
        _ => match &mut list[at] {
            Action::Forward { mb, .. }
            | Action::Backward { mb, .. }
            | Action::BackwardInput { mb, .. }
            | Action::BackwardWeight { mb, .. } => *mb += 1,
            Action::Send(message) | Action::Recv(message) => message.mb += 1,
            Action::Exchange(exchange) => exchange.mb += 1,
            Action::ReduceScatter { mb, .. } | Action::AllGather { mb, .. } => *mb += 1,
            Action::AllReduce { .. } => return None,
        },
    }
    Some(())
}

/// Lets an Action name another Stage, or none where it must, or one where it must not.
fn damage_names(program: &mut Program, _: Damage, which: Index, place: Index) -> Option<()> {
    let own = pick(program.ranks.iter_mut().filter(|own| !own.forward.is_empty()), which)?;
    let other = own.seats[place.index(own.seats.len())].stage;
    match pick(own.forward.iter_mut(), place)? {
        Action::Forward { stage, .. }
        | Action::Backward { stage, .. }
        | Action::BackwardInput { stage, .. }
        | Action::BackwardWeight { stage, .. } => *stage = if *stage == Some(other) { None } else { Some(other) },
        Action::Send(message) | Action::Recv(message) => {
            message.stages = match message.stages {
                Some((from, to)) => Some((to, from)).filter(|_| other == to),
                None => Some((other, other + 1)),
            };
        }
        _ => return None,
    }
    Some(())
}

fn damage_message(program: &mut Program, damage: Damage, which: Index, place: Index) -> Option<()> {
    let world = program.ranks.len();
    let (peer, pieces) = message(program, which)?;
    let at = place.index(pieces.len());
    let piece = pieces[at];
    match damage {
        Damage::DropPiece => {
            pieces.remove(at);
        }
        Damage::RepeatPiece => pieces.push(piece),
        Damage::ShiftPiece => shift(&mut pieces[at].rows),
        Damage::ShrinkPiece => pieces[at].rows.hi -= 1,
        _ => *peer = other(*peer, world, place)?,
    }
    Some(())
}

fn damage_transfer(program: &mut Program, damage: Damage, which: Index, place: Index) -> Option<()> {
    let world = program.ranks.len();
    let list = transfers(program, which)?;
    let at = place.index(list.len());
    match damage {
        Damage::DropTransfer => {
            list.remove(at);
        }
        Damage::RepeatTransfer => list.push(list[at]),
        Damage::ShiftTransfer => shift(&mut list[at].rows),
        Damage::OtherSource => list[at].src = other(list[at].src, world, which)?,
        _ => list[at].dst = other(list[at].dst, world, which)?,
    }
    Some(())
}

fn damage_rows(program: &mut Program, damage: Damage, which: Index, place: Index) -> Option<()> {
    match damage {
        Damage::MoreRows => program.total_rows += 1,
        Damage::LongerMicrobatch => *pick(program.microbatches.iter_mut(), place)? += 1,
        Damage::ShiftStageRows => {
            shift(pick(program.stage_rows.iter_mut().flatten().flatten().filter(|rows| !rows.is_empty()), place)?);
        }
        _ => {
            let slices = pick(program.slices.iter_mut().filter(|slices| !slices.is_empty()), which)?;
            let at = place.index(slices.len());
            match damage {
                Damage::DropSlice => {
                    slices.remove(at);
                }
                Damage::ShiftSlice => shift(&mut slices[at].local),
                _ => slices[at].at += 1,
            }
        }
    }
    Some(())
}

/// The places of a list's sums.
fn sums(list: &[Action]) -> Vec<usize> {
    (0..list.len()).filter(|&place| list[place].group().is_some()).collect()
}

/// The places of what fills buckets in a list.
fn backwards(list: &[Action]) -> Vec<usize> {
    let fills = |action: &Action| matches!(action, Action::Backward { .. } | Action::BackwardWeight { .. });
    (0..list.len()).filter(|&place| fills(&list[place])).collect()
}

/// Breaks one rank's sums.
fn damage_sums(program: &mut Program, damage: Damage, which: Index, place: Index) -> Option<()> {
    let (buckets, groups) = (program.buckets.len(), program.groups.len());
    let list = pick(lists(program).filter(|list| !sums(list).is_empty()), which)?;
    let at = *pick(sums(list).iter(), place)?;
    let divided = matches!(list[at], Action::ReduceScatter { .. });
    let gathered = if let Action::AllGather { mb, pass, .. } = list[at] { Some((mb, pass)) } else { None };
    let (Action::AllReduce { group, bucket, bytes }
    | Action::ReduceScatter { group, bucket, bytes, .. }
    | Action::AllGather { group, bucket, bytes, .. }) = &mut list[at]
    else {
        return None;
    };
    match damage {
        Damage::OtherBucket => *bucket = other(*bucket, buckets, which)?,
        Damage::OtherGroup => *group = other(*group, groups, which)?,
        Damage::OtherBytes => *bytes += 1,
        Damage::SwapSums => {
            let own = *group;
            let of_group = |at: &usize| list[*at].group() == Some(own);
            let next = *sums(list).iter().filter(|other| **other > at).find(|at| of_group(at))?;
            list.swap(at, next);
        }
        Damage::OtherSum => {
            let (group, bucket, bytes) = (*group, *bucket, *bytes);
            list[at] = if divided || gathered.is_some() {
                Action::AllReduce { group, bucket, bytes }
            } else {
                Action::ReduceScatter { group, bucket, mb: 0, bytes }
            };
        }
        Damage::LateSum => {
            // Sums of whole buckets may come late.
            let late = |action: &Action| match (action, gathered) {
                (Action::Backward { .. }, None) => divided,
                (Action::Backward { mb, .. } | Action::BackwardInput { mb, .. }, Some((of, Pass::Backward))) => {
                    *mb == of
                }
                (Action::Forward { mb, .. }, Some((of, Pass::Forward))) => *mb == of,
                _ => false,
            };
            let next = (at..list.len()).find(|&next| late(&list[next]))?;
            let sum = list.remove(at);
            list.insert(next, sum);
        }
        _ => {
            let before = backwards(list).into_iter().filter(|&backward| backward < at).count();
            if gathered.is_some() || (divided && before == 0) || backwards(list).len() < 2 {
                return None;
            }
            let sum = list.remove(at);
            list.insert(0, sum);
        }
    }
    Some(())
}

/// Gathers for the other computation of a microbatch.
fn damage_gather(program: &mut Program, _: Damage, which: Index, _: Index) -> Option<()> {
    let passes = lists(program).flatten().filter_map(|action| match action {
        Action::AllGather { pass, .. } => Some(pass),
        _ => None,
    });
    let pass = pick(passes, which)?;
    *pass = if *pass == Pass::Forward { Pass::Backward } else { Pass::Forward };
    Some(())
}

/// Breaks the buckets, alike for all ranks.
fn damage_buckets(program: &mut Program, damage: Damage, which: Index, place: Index) -> Option<()> {
    let world = program.ranks.len();
    let count = program.buckets.len();
    match damage {
        Damage::OtherMembers => {
            let used: Vec<u32> = program.buckets.iter().map(|bucket| bucket.group).collect();
            let group = *pick(used.iter(), which)?;
            let ranks = &mut program.groups[group as usize];
            if ranks.len() > 1 {
                ranks.remove(place.index(ranks.len()));
            } else {
                ranks.push(other(ranks[0], world, place)?);
                ranks.sort_unstable();
            }
        }
        Damage::LargerBucket => pick(program.buckets.iter_mut(), which)?.bytes += 1,
        Damage::OtherSpan => {
            let span = &mut pick(program.buckets.iter_mut(), which)?.span;
            *span = if span.is_some() { None } else { Some(0) };
        }
        _ => {
            let from = which.index(count.max(1));
            let params = &mut program.buckets.get_mut(from)?.params;
            let at = place.index(params.len());
            let param = params[at];
            match damage {
                Damage::RepeatParam => params.push(param),
                Damage::DropParam => drop(params.remove(at)),
                _ => {
                    let to = other(u32::try_from(from).ok()?, count, place)?;
                    program.buckets[from].params.remove(at);
                    program.buckets[to as usize].params.push(param);
                }
            }
        }
    }
    Some(())
}

/// Breaks the Program; `None` when it has nothing to break in this way.
fn apply(program: &mut Program, damage: Damage, which: Index, place: Index) -> Option<()> {
    let broken = match damage {
        Damage::DropAction | Damage::RepeatAction | Damage::OtherMicrobatch => damage_actions,
        Damage::OtherStage => damage_names,
        Damage::DropPiece | Damage::RepeatPiece | Damage::ShiftPiece | Damage::ShrinkPiece | Damage::OtherPeer => {
            damage_message
        }
        Damage::DropTransfer
        | Damage::RepeatTransfer
        | Damage::ShiftTransfer
        | Damage::OtherSource
        | Damage::OtherDestination => damage_transfer,
        Damage::DropSlice
        | Damage::ShiftSlice
        | Damage::MoveSlice
        | Damage::ShiftStageRows
        | Damage::MoreRows
        | Damage::LongerMicrobatch => damage_rows,
        Damage::OtherBucket
        | Damage::OtherGroup
        | Damage::OtherBytes
        | Damage::SwapSums
        | Damage::EarlySum
        | Damage::LateSum
        | Damage::OtherSum => damage_sums,
        Damage::OtherPass => damage_gather,
        Damage::DropParam
        | Damage::RepeatParam
        | Damage::MoveParam
        | Damage::OtherMembers
        | Damage::LargerBucket
        | Damage::OtherSpan => damage_buckets,
    };
    broken(program, damage, which, place)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn damage_is_found(case in cases(), which in any::<Index>(), place in any::<Index>()) {
        let sound = case.build();
        let mut found = 0;
        for damage in DAMAGES {
            let mut program = sound.clone();
            if apply(&mut program, damage, which, place).is_some() {
                let verdict = case.check(&program);
                prop_assert!(verdict.is_err(), "{:?} passes", damage);
                prop_assert!(!matches!(verdict, Err(CheckError::Deadlock(_))), "{:?} seen as a deadlock", damage);
                found += 1;
            }
        }
        prop_assert!(found >= 6, "only {found} kinds of damage could be done");
    }

    /// Not every swap does harm; the checker and a run must agree.
    #[test]
    fn swapped_actions_are_judged_rightly(case in cases(), swaps in proptest::collection::vec(any::<[Index; 3]>(), 12)) {
        let sound = case.build();
        for [list, first, second] in swaps {
            let mut program = sound.clone();
            let Some(list) = pick(lists(&mut program).filter(|list| list.len() > 1), list) else { return Ok(()) };
            let (first, second) = (first.index(list.len()), second.index(list.len()));
            list.swap(first, second);
            agree(&case, &program)?;
        }
    }

    /// Stages under different schedules, which may wait for each other for ever.
    #[test]
    fn mixed_schedules_deadlock_when_the_checker_says_so(case in lone_cases(), drains in any::<[Option<bool>; 5]>()) {
        let case = case.with(Call::Whole, ScheduleKind::OneForwardOneBackward);
        let mut program = case.build();
        let drained = [Call::Whole, Call::Halves].map(|call| case.with(call, ScheduleKind::FillDrain).build());
        for (rank, own) in program.ranks.iter_mut().enumerate() {
            if let Some(halves) = drains[own.seats[0].stage as usize] {
                own.forward = in_one_list(&drained[usize::from(halves)], rank);
            }
        }
        let verdict = case.check(&program);
        prop_assert!(matches!(verdict, Ok(()) | Err(CheckError::Deadlock(_))), "{:?}", verdict);
        agree(&case, &program)?;
    }
}

fn agree(case: &Given, program: &Program) -> Result<(), TestCaseError> {
    let run = oracle::run(case, program);
    match case.check(program) {
        Ok(()) => prop_assert_eq!(run, Ok(())),
        Err(CheckError::Deadlock(Deadlock(blocked))) => {
            prop_assert_eq!(run, Err(Failure::Stuck));
            prop_assert!(!blocked.is_empty());
            for blocked in blocked {
                let own = &program.ranks[blocked.rank as usize];
                let action = own.forward.iter().chain(&own.backward).nth(blocked.position);
                prop_assert_eq!(action, Some(&blocked.action));
            }
        }
        Err(_) => {}
    }
    Ok(())
}

/// Both lists of a rank as those of a call with its loss inside, to which no gradients of outputs come, and within which
/// what was gathered to stay whole does.
fn in_one_list(program: &Program, rank: usize) -> Vec<Action> {
    let own = &program.ranks[rank];
    let is_kept = |bucket: u32| program.buckets[bucket as usize].sharding == Sharding::KeptParams;
    let comes = |action: &&Action| match **action {
        Action::Exchange(ref exchange) => exchange.kind != BatchKind::OutputGrad,
        Action::AllGather { bucket, pass: Pass::Backward, .. } => !is_kept(bucket),
        _ => true,
    };
    own.forward.iter().chain(&own.backward).filter(comes).cloned().collect()
}

/// The case's 1F1B Program, but that one Stage does all its forwards first.
fn with_one_stage_drained(case: &Given, stage: u32) -> Program {
    let mut program = case.build();
    let drained = case.with(Call::Halves, ScheduleKind::FillDrain).build();
    for (rank, own) in program.ranks.iter_mut().enumerate().filter(|(_, own)| own.seats[0].stage == stage) {
        own.forward = in_one_list(&drained, rank);
    }
    program
}

#[test]
fn a_deadlock_names_ranks_and_actions() {
    let case = Given::chain(&[1, 1], 4, &[4, 4], Call::Whole, ScheduleKind::OneForwardOneBackward);
    let error = case.check(&with_one_stage_drained(&case, 1)).expect_err("each waits for the other");
    assert_eq!(
        error.to_string(),
        "deadlock: rank 0 waits in action 11, Backward(mb 0); rank 1 waits in action 12, Forward(mb 2);"
    );
}

/// Stage 0 needs gradients from Stage 2 alone, so only the limit on unread gradients makes Stage 2 wait.
#[test]
fn the_third_unread_gradient_waits() {
    let mut case = Given::chain(&[1, 1, 1], 8, &[8, 8, 8], Call::Whole, ScheduleKind::OneForwardOneBackward);
    case.partition.crossings[0].requires_grad = false;
    let skip = Crossing { value: ValueId(9), from: 0, to: vec![2], row_dim: ROWS, requires_grad: true };
    case.partition.crossings.push(skip);
    let Err(CheckError::Deadlock(Deadlock(blocked))) = case.check(&with_one_stage_drained(&case, 1)) else {
        panic!("stage 2 waits until stage 1 reads a gradient")
    };
    let waits: Vec<String> = blocked.iter().map(|blocked| blocked.action.to_string()).collect();
    assert_eq!(waits, ["Backward(mb 3)", "Forward(mb 6)", "Send(mb 2, gradients to rank 1: v1[0..3])"]);
    case.placement.microbatches = 5;
    assert_eq!(case.check(&with_one_stage_drained(&case, 1)), Ok(()));
}

/// What a person reads about one broken Action.
#[test]
fn errors_name_rank_and_action() {
    let mut case = Given::chain(&[1, 2], 2, &[2, 2, 2], Call::Whole, ScheduleKind::OneForwardOneBackward);
    case.params.push(Held::whole(DType::Float32, 8, &[1]));
    let error_after = |damage: &dyn Fn(&mut Program)| {
        let mut program = case.build();
        damage(&mut program);
        case.check(&program).expect_err("the program is damaged").to_string()
    };
    let place = |program: &Program, rank: usize, text: &str| {
        let mut actions = program.ranks[rank].forward.iter();
        actions.position(|action| action.to_string().starts_with(text)).expect("it is there")
    };
    let swapped = |rank: usize, one: &'static str, other: &'static str| {
        error_after(&move |program| {
            let places = [one, other].map(|text| place(program, rank, text));
            program.ranks[rank].forward.swap(places[0], places[1]);
        })
    };
    assert_eq!(
        swapped(1, "Recv(mb 0, values", "Forward(mb 0)"),
        "rank 1, action 2, Forward(mb 0): rows 0..2 of v0 must have come exactly once from stage 0"
    );
    assert_eq!(
        swapped(0, "Forward(mb 0)", "Send(mb 0, values"),
        "rank 0, action 2, Send(mb 0, values to rank 1: v0[0..2]): it sends what is computed later"
    );
    assert_eq!(
        swapped(0, "Exchange(mb 0, inputs", "Forward(mb 0)"),
        "rank 0, action 2, Exchange(mb 0, inputs from rank 1: v100[1..2] from rank 2: v100[2..3]): the computation that \
         needs it comes earlier"
    );
    assert_eq!(
        swapped(1, "Exchange(mb 0, outputs", "Forward(mb 0)"),
        "rank 1, action 3, Exchange(mb 0, outputs to rank 0: v1[0..1]): it sends what is computed later"
    );
    assert!(swapped(1, "Exchange(mb 0, inputs", "Exchange(mb 1, inputs").starts_with("deadlock: rank 0 waits in"));
    assert_eq!(
        error_after(&|program| {
            let place = place(program, 0, "Exchange(mb 0, inputs");
            let Action::Exchange(exchange) = &mut program.ranks[0].forward[place] else { panic!("it is one") };
            exchange.recvs[0].pieces[0].rows = Interval::new(0, 1);
        }),
        "rank 0, action 0, Exchange(mb 0, inputs from rank 1: v100[0..1] from rank 2: v100[2..3]): rows 0..1 of v100 are \
         not to go there, or have gone before"
    );
    let dropped = |rank: usize, text: &'static str| {
        error_after(&move |program| {
            let place = place(program, rank, text);
            program.ranks[rank].forward.remove(place);
        })
    };
    assert_eq!(dropped(2, "AllReduce"), "rank 2 lacks AllReduce(bucket 0, 8 bytes over group 1)");
    assert_eq!(
        dropped(1, "Exchange(mb 1, inputs"),
        "input transfer of v100[1..2] of microbatch 1 from rank 1 to rank 0: no exchange carries it"
    );
    let late_send = |program: &mut Program| {
        let place = place(program, 0, "Send(mb 0, values");
        let actions = &mut program.ranks[0].forward;
        let send = actions.remove(place);
        actions.push(send);
    };
    assert_eq!(
        error_after(&late_send),
        "rank 0, action 8, Send(mb 1, values to rank 1: v0[0..2]) meets Recv(mb 0, values from rank 0: v0[0..2]) \
         of rank 1"
    );
}
