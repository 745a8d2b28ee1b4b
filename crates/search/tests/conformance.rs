//! One list of Programs, on which the checker, the simulator and the exact time agree. The same list runs through the
//! runtime in `tests/conformance`.

use std::fmt::Write as _;
use std::path::PathBuf;

use proptest::prelude::*;
use rannc_cost::Cluster;
use rannc_ir::testing::{GraphBuilder, cases};
use rannc_ir::{Analysis, Arg, DType, Dim, Graph, OpRun, ValueId};
use rannc_plan::testing::in_two_parts;
use rannc_plan::{
    Action, Batch, BlockPlan, Buckets, Call, CheckError, Crew, Interval, Order, Partition, Payload, Placement, Plan,
    Program, Promises, Recompute, Schedule, ScheduleKind, Sharding, StagePlan, StagePrediction, StepPrediction,
    Trained, build, check, check_memory, grid, in_flight, split_even,
};
use rannc_search::{Blocks, PlanCosts, Settings};
use rannc_sim::{Costs, Timeline, simulate};

const WIDTH: i64 = 256;
/// How far an exact time may be from the simulator's: both run the same machine at the same prices, and add up the bytes of
/// a message in other orders.
const ROUNDING: f64 = 1e-9;

/// A line of the list.
#[derive(Debug)]
struct Case {
    model: String,
    replicas: Vec<usize>,
    /// By Stage.
    ranks: Vec<Vec<u32>>,
    microbatches: u32,
    rows: Vec<u64>,
    schedule: Schedule,
    call: Call,
    /// By Stage.
    sharding: Vec<Sharding>,
}

impl Case {
    fn parse(line: &str) -> Self {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let (fields, divided) = fields.split_at(6);
        let [model, replicas, microbatches, rows, schedule, call] = fields else { panic!("six fields in {line}") };
        let named = |name: &str| serde_json::Value::from(name);
        let counts: Vec<usize> = replicas.split(' ').map(|count| count.parse().expect("a count")).collect();
        Self {
            model: (*model).to_owned(),
            ranks: dealt(&counts, counts.iter().sum()),
            replicas: counts,
            microbatches: microbatches.parse().expect("a count"),
            rows: rows.split(' ').map(|count| count.parse().expect("a count")).collect(),
            schedule: match schedule.split_once('/') {
                Some(_) => {
                    Schedule::Explicit(schedule.split('/').map(|text| text.parse().expect("an order")).collect())
                }
                None => serde_json::from_value(named(schedule)).expect("a schedule"),
            },
            call: serde_json::from_value(named(call)).expect("a call"),
            sharding: match divided {
                [] => vec![Sharding::None; replicas.split(' ').count()],
                levels => {
                    levels[0].split(' ').map(|level| serde_json::from_value(named(level)).expect("a level")).collect()
                }
            },
        }
    }

    fn stages(&self) -> u32 {
        u32::try_from(self.replicas.len()).expect("few")
    }

    /// Two Ops a Stage.
    fn cuts(&self) -> Vec<OpRun> {
        (0..self.stages()).map(|stage| OpRun { first: 2 * stage, end: 2 * stage + 2 }).collect()
    }

    fn graph(&self) -> Graph {
        let mut builder = GraphBuilder::new(&self.model);
        let wide = [Dim::rows(1), Dim::fixed(WIDTH)];
        let input = builder.input(DType::Float32, &wide);
        let table = builder.param("table", &[WIDTH, WIDTH]);
        let linear = |builder: &mut GraphBuilder, value: ValueId, stage: u32, name: &str| {
            if self.model == "tied" && (stage == 0 || stage + 1 == self.stages()) {
                return builder.op("aten.linear.default", vec![Arg::Value(value), Arg::Value(table)], &wide);
            }
            builder.linear(value, WIDTH, &format!("{name}.{stage}"))
        };
        let (mut left, mut right, mut first) = (input, input, None);
        for stage in 0..self.stages() {
            left = linear(&mut builder, left, stage, "left");
            right = match self.model.as_str() {
                // All later Stages send back gradients of what the first one makes.
                "skipping" => builder.pointwise("aten.add.Tensor", &[left, *first.get_or_insert(left)]),
                "wide" => linear(&mut builder, right, stage, "right"),
                _ => builder.pointwise("aten.tanh.default", &[left]),
            };
            if self.model != "wide" {
                left = right;
            }
        }
        let outputs = if self.model == "wide" { vec![left, right] } else { vec![right] };
        builder.finish(&outputs)
    }

    /// True when all ranks bring the rows that Plans are priced for.
    fn has_planned_rows(&self) -> bool {
        let planned = split_even(self.rows.iter().sum(), self.rows.len());
        planned.into_iter().map(Interval::rows).eq(self.rows.iter().copied())
    }

    /// The Plan, without expectations.
    fn plan(&self, graph: &Graph) -> Plan {
        let each_op = |stage: OpRun| (stage.first..stage.end).map(|first| OpRun { first, end: first + 1 });
        let blocks = Blocks::of(graph, &Analysis::new(graph), self.cuts().into_iter().flat_map(each_op));
        let block = |ops: OpRun| {
            let block = blocks.blocks.iter().find(|block| block.ops == ops).expect("each op is a Block");
            BlockPlan { ops, hash: blocks.hashes[block.kind as usize].clone(), recompute: Recompute::None }
        };
        let stage = |((ranks, ops), &sharding): ((Vec<u32>, OpRun), &Sharding)| StagePlan {
            ops,
            modules: vec!["net".to_owned()],
            ranks,
            blocks: each_op(ops).map(block).collect(),
            feeds: None,
            sharding,
            offload: false,
            bucket_bytes: None,
            predicted: StagePrediction::default(),
        };
        let plan = Plan {
            schema: rannc_plan::PLAN_SCHEMA,
            pyrannc: String::new(),
            graph_hash: graph.hash(),
            graph_name: graph.name.clone(),
            precision: String::new(),
            world_size: u32::try_from(self.rows.len()).expect("few"),
            batch_rows: self.rows.iter().sum(),
            microbatches: self.microbatches,
            schedule: self.schedule.clone(),
            stages: self.ranks.iter().cloned().zip(self.cuts()).zip(&self.sharding).map(stage).collect(),
            eager_spans: Vec::new(),
            memory_budget_percent: None,
            predicted: StepPrediction::default(),
            checksum: String::new(),
        };
        plan.seal().expect("the plan is consistent")
    }
}

/// The Replicas of Stages dealt out to so many ranks, at least as many as the largest Stage has.
fn dealt(replicas: &[usize], ranks: usize) -> Vec<Vec<u32>> {
    let mut places = (0..ranks).cycle().map(|place| u32::try_from(place).expect("few"));
    replicas.iter().map(|&count| places.by_ref().take(count).collect()).collect()
}

/// Every computation takes one tick, all else no time.
struct Ticks;

impl Costs for Ticks {
    fn forward_us(&self, _: u32, _: u64) -> f64 {
        1.0
    }
    fn backward_us(&self, _: u32, _: u64) -> f64 {
        1.0
    }
    fn backward_input_us(&self, _: u32, _: u64) -> f64 {
        1.0
    }
    fn backward_weight_us(&self, _: u32, _: u64) -> f64 {
        1.0
    }
    fn waiting_bytes(&self, _: u32, _: u64) -> u64 {
        0
    }
    fn send_us(&self, _: u32, _: u32, _: u64) -> f64 {
        0.0
    }
    fn value_bytes(&self, _: ValueId, _: u64) -> u64 {
        0
    }
    fn reduce_us(&self, _: u32, _: u64) -> f64 {
        0.0
    }
    fn reduce_scatter_us(&self, _: u32, _: u64) -> f64 {
        0.0
    }
    fn gather_us(&self, _: u32, _: u64) -> f64 {
        0.0
    }
    fn reduce_tied_us(&self, _: &[u32], _: u64) -> f64 {
        0.0
    }
    fn update_us(&self, _: u32) -> f64 {
        0.0
    }
    fn fixed_bytes(&self, _: u32) -> u64 {
        0
    }
    fn framework_bytes(&self, _: u32) -> u64 {
        0
    }
    fn microbatch_bytes(&self, _: u32, _: u64) -> u64 {
        1
    }
    fn workspace_bytes(&self, _: u32, _: u64) -> u64 {
        0
    }
}

/// What the simulator says, in the words of the drawn grid.
fn drawn(timeline: &Timeline) -> String {
    let mut text = String::new();
    for rank in &timeline.ranks {
        write!(text, "{}:", rank.rank).expect("a String takes any text");
        let mut tick = 0;
        for event in &rank.events {
            let Some(name) = event.what.computed() else { continue };
            text += &" . ".repeat(event.start_us as usize - tick);
            write!(text, " {name}").expect("a String takes any text");
            tick = event.start_us as usize + 1;
        }
        text += "\n";
    }
    text
}

fn cells(drawing: &str) -> Vec<Vec<&str>> {
    let line = |line| {
        let mut cells: Vec<&str> = str::split_whitespace(line).collect();
        while cells.last() == Some(&".") {
            cells.pop();
        }
        cells
    };
    drawing.lines().map(line).collect()
}

/// What stands below a case.
fn told(program: &Program) -> String {
    let drawing = grid(program).expect("checked programs come to their end");
    let held = in_flight(program).expect("checked programs come to their end");
    let mut text = String::new();
    for ((own, line), held) in program.ranks.iter().zip(drawing.lines()).zip(held) {
        let count =
            |is: fn(&Action) -> bool| own.forward.iter().chain(&own.backward).filter(|&action| is(action)).count();
        let messages = count(|action| matches!(action, Action::Send(_)));
        let exchanged = count(|action| matches!(action, Action::Exchange(_)));
        let sums = count(|action| matches!(action, Action::AllReduce { .. }));
        let scattered = count(|action| matches!(action, Action::ReduceScatter { .. }));
        let gathered = count(|action| matches!(action, Action::AllGather { .. }));
        write!(text, "{line} | {held} held, {messages} sent, {exchanged} exchanged, {sums} summed")
            .expect("a String takes any text");
        if program.buckets.iter().any(|bucket| bucket.sharding >= Sharding::Gradients) {
            write!(text, ", {scattered} scattered, {gathered} gathered").expect("a String takes any text");
        }
        text += "\n";
    }
    text
}

/// Runs a case through all that know it; returns what the machine tells of it.
fn conform(case: &Case) -> String {
    let graph = case.graph();
    let plan = case.plan(&graph);
    let partition = plan.partition(&graph).expect("the cuts are allowed");
    let placement: Placement = plan.placement();
    let buckets = Buckets::of(&graph, &partition, &placement, &Trained::captured(&graph));
    let batch = Batch { rows_per_rank: case.rows.clone(), gather_inputs: true };
    let program = build(&placement, &partition, &buckets, &batch, case.call).expect("the case is sound");
    assert_eq!(check(&program, &partition, &buckets.gradients), Ok(()), "{case:?}");
    let told = told(&program);

    let ticks = simulate(&program, &Ticks).expect("checked programs run");
    let checker = grid(&program).expect("checked programs come to their end");
    assert_eq!(cells(&drawn(&ticks)), cells(&checker), "{case:?}");
    let peaks: Vec<u64> = ticks.ranks.iter().map(|rank| rank.peak_bytes).collect();
    assert_eq!(Ok(peaks), in_flight(&program), "{case:?}");

    for nodes in [1, 2] {
        let cluster = Cluster::preset("H200", nodes, plan.world_size.div_ceil(nodes)).expect("devices");
        let costs = PlanCosts::new(&graph, &cluster, &[], &Settings::default(), &plan).expect("its own plan");
        let predicted = costs.predicted().expect("figures");
        assert_eq!(
            check_memory(&program, &partition, &Promises::new(&predicted, &graph, &partition)),
            Ok(()),
            "{case:?}"
        );
        if case.call == costs.call() && case.has_planned_rows() {
            let (exact_us, simulated) = (predicted.predicted.step_us, simulate(&program, &costs));
            let simulated_us = simulated.expect("checked programs run").step_us;
            let error = exact_us / simulated_us - 1.0;
            assert!(error.abs() <= ROUNDING, "{case:?}: {exact_us} {simulated_us}");
        }
    }
    told
}

#[test]
fn checker_simulator_and_exact_time_agree() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/conformance/programs.txt");
    let text = std::fs::read_to_string(&path).expect("the list is there");
    let mut now = String::new();
    for line in text.lines() {
        let is_case = line.starts_with(|first: char| first.is_alphabetic());
        if is_case || line.is_empty() || line.starts_with('#') {
            writeln!(now, "{line}").expect("a String takes any text");
        }
        if is_case {
            now += &conform(&Case::parse(line));
        }
    }
    if std::env::var_os("RANNC_BLESS").is_some() {
        std::fs::write(path, now).expect("the list can be written");
    } else {
        assert_eq!(text, now);
    }
}

/// Microbatches and Replicas with fewer rows than the largest have prices of their own, for both parts of a backward too.
#[test]
fn rows_that_do_not_divide_conform() {
    let rows = ["15"; 13].join(" ");
    let whole = "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5";
    let parts = "F0 F1 F2 F3 F4 F5 I0 I1 W0 W1 B2 I3 I4 I5 W3 W4 W5";
    for line in [
        "chain, 1 1, 3, 4 4, F0 F1 F2 I0 I1 I2 W0 W1 W2/F0 F1 F2 B0 B1 B2, halves",
        "chain, 2 1, 1, 1 1 1, fill_drain, halves",
        &format!(
            "tied, 1 4 2 3 3, 6, {rows}, {parts}/{whole}/{whole}/{whole}/{whole}, halves, none params params params params"
        ),
    ] {
        conform(&Case::parse(line));
    }
}

fn drawn_cases() -> impl Strategy<Value = Case> {
    let models = prop::sample::select(vec!["chain", "wide", "tied", "skipping"]);
    let schedules = prop::sample::select(vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain]);
    let levels = prop::sample::select(Sharding::ALL.to_vec());
    let parts = prop::option::of(any::<u64>());
    let replicas = (prop::collection::vec(1..5_usize, 1..6), prop::option::weighted(0.3, 0..4_usize));
    (models, replicas, 1..10_u32, 9..200_u64, schedules, levels, parts).prop_map(
        |(model, (replicas, shared), microbatches, rows, schedule, level, parts)| {
            let all: usize = replicas.iter().sum();
            let most = replicas.iter().copied().max().unwrap_or(1);
            let ranks = shared.map_or(all, |more| (most + more).min(all));
            let level = if ranks < all { level.min(Sharding::Optimizer) } else { level };
            let sharding: Vec<Sharding> =
                replicas.iter().map(|&count| if count > 1 { level } else { Sharding::None }).collect();
            let stage_ranks = dealt(&replicas, ranks);
            Case {
                model: model.to_owned(),
                microbatches,
                rows: {
                    // Equally many in all places, equally many on all ranks, any.
                    let of_batch = match rows % 3 {
                        0 => (1 + rows % 8) * ranks as u64 * u64::from(microbatches),
                        1 => u64::from(microbatches).div_ceil(ranks as u64).max(rows % 30) * ranks as u64,
                        _ => rows,
                    };
                    split_even(of_batch, ranks).into_iter().map(Interval::rows).collect()
                },
                schedule: match parts {
                    Some(seed) => split(schedule.into(), model, &stage_ranks, &sharding, microbatches, seed),
                    None => schedule.into(),
                },
                call: if schedule == ScheduleKind::FillDrain { Call::Halves } else { Call::Whole },
                sharding,
                ranks: stage_ranks,
                replicas,
            }
        },
    )
}

/// The Schedule of a model's Stages with backwards in two parts where no gradients are divided.
fn split(
    schedule: Schedule,
    model: &str,
    ranks: &[Vec<u32>],
    sharding: &[Sharding],
    microbatches: u32,
    seed: u64,
) -> Schedule {
    let mut feeds: Vec<(usize, usize)> = (1..ranks.len()).map(|to| (to - 1, to)).collect();
    if model == "skipping" {
        feeds.extend((2..ranks.len()).map(|to| (0, to)));
    }
    let may_split = |crew: &Crew| crew.stages.iter().all(|&stage| sharding[stage as usize] < Sharding::Gradients);
    let order = |(crew, (stage, order)): (Crew, (usize, Order))| {
        if may_split(&crew) { in_two_parts(&order, seed ^ stage as u64) } else { order }
    };
    let orders = schedule.orders(ranks, &feeds, microbatches).into_iter().enumerate();
    Schedule::Explicit(Crew::of_stages(ranks).into_iter().zip(orders).map(order).collect())
}

proptest! {
    #![proptest_config(cases(1000))]

    /// Also where Stages have gradients from several others, no rank holds more than was promised.
    #[test]
    fn drawn_programs_conform(case in drawn_cases()) {
        conform(&case);
    }
}

/// A chain of four Stages under 1F1B, with so many Replicas each, and what its Plan promises.
fn promised(replicas: usize) -> (Program, Partition, Buckets, Promises) {
    let line = format!("chain, {0} {0} {0} {0}, 8, {1}, 1f1b, whole", replicas, ["8"; 8][..4 * replicas].join(" "));
    let case = Case::parse(&line);
    let (graph, cluster) = (case.graph(), Cluster::preset("H200", 1, 8).expect("devices"));
    let plan = case.plan(&graph);
    let costs = PlanCosts::new(&graph, &cluster, &[], &Settings::default(), &plan).expect("its own plan");
    let partition = plan.partition(&graph).expect("the cuts are allowed");
    let promises = Promises::new(&costs.predicted().expect("figures"), &graph, &partition);
    let buckets = Buckets::of(&graph, &partition, &plan.placement(), &Trained::captured(&graph));
    let batch = Batch { rows_per_rank: case.rows.clone(), gather_inputs: true };
    let program = build(&plan.placement(), &partition, &buckets, &batch, case.call).expect("the case is sound");
    (program, partition, buckets, promises)
}

/// What comes to its end and computes the right thing may still hold too much.
#[test]
fn what_holds_more_than_promised_is_found() {
    type Change = fn(&mut Vec<Action>);
    // Stable sorts: each kind of Action stays in its order.
    let changes: [(&str, Change); 3] = [
        ("forwards first", |actions| {
            actions.sort_by_key(|action| match action {
                Action::Forward { .. } | Action::Exchange(_) => 0,
                Action::Send(message) | Action::Recv(message) => u8::from(message.kind == Payload::Grad),
                _ => 1,
            });
        }),
        ("values first", |actions| {
            actions.sort_by_key(|action| !matches!(action, Action::Recv(message) if message.kind == Payload::Value));
        }),
        ("gradients first", |actions| {
            actions.sort_by_key(|action| !matches!(action, Action::Recv(message) if message.kind == Payload::Grad));
        }),
    ];
    for replicas in [1, 2] {
        let (program, partition, buckets, promises) = promised(replicas);
        assert_eq!(check_memory(&program, &partition, &promises), Ok(()));
        for (name, change) in changes {
            let mut damaged = program.clone();
            damaged.ranks.iter_mut().for_each(|own| change(&mut own.forward));
            assert_eq!(check(&damaged, &partition, &buckets.gradients), Ok(()), "{name}");
            let found = check_memory(&damaged, &partition, &promises);
            assert!(matches!(found, Err(CheckError::Memory { .. })), "{name}: {found:?}");
        }
    }
}
