//! What ranks hold is held against what their Plan promises, to the byte.

use proptest::collection::vec;
use proptest::prelude::*;
use rannc_ir::testing::GraphBuilder;
use rannc_ir::{Arg, DType, Dim, Graph, OpRun, ValueId};
use rannc_plan::{
    Action, Batch, BlockPlan, Buckets, Call, CheckError, Holding, Interval, MemoryPrediction, Order, PLAN_SCHEMA,
    Partition, PassPrediction, Payload, Plan, Program, Promises, Recompute, ScheduleKind, Sharding, StagePlan,
    StagePrediction, StepPrediction, Trained, WholePrediction, build, check, check_memory, split_even,
};

const ELEMENT: u64 = 4;

/// A chain of linear layers, of which each is a Span.
#[derive(Clone, Debug)]
struct Case {
    /// By Stage, how wide each of its layers is.
    widths: Vec<Vec<u64>>,
    replicas: Vec<usize>,
    sharding: Vec<Sharding>,
    batch_rows: u64,
    gather_inputs: bool,
    microbatches: u32,
    schedule: ScheduleKind,
    call: Call,
    /// True when the layers compute with copies of their weights of half the digits.
    half_digits: bool,
}

/// What a rank of a Stage works on.
struct Layers {
    /// Of what comes in, and behind each layer.
    widths: Vec<u64>,
    is_first: bool,
    is_last: bool,
}

/// The most of two layers that follow each other.
fn two_of(bytes: &[u64]) -> u64 {
    bytes.windows(2).map(|pair| pair.iter().sum()).chain(bytes.iter().copied()).max().unwrap_or(0)
}

/// While one layer's gradients come, those of the layer behind it are summed, and the part of a Replica arrives.
fn summed_at_once(bytes: &[u64], replicas: u64) -> u64 {
    let pairs = bytes.windows(2).map(|pair| pair[0] + pair[1] + pair[1] / replicas);
    pairs.chain(bytes.iter().copied()).max().unwrap_or(0)
}

impl Layers {
    /// By layer, with weights of such elements.
    fn param_bytes(&self, weight_element: u64) -> Vec<u64> {
        self.widths.windows(2).map(|pair| (weight_element * pair[0] + ELEMENT) * pair[1]).collect()
    }

    fn in_bytes(&self, rows: u64) -> u64 {
        if self.is_first { 0 } else { ELEMENT * rows * self.widths[0] }
    }

    fn out_bytes(&self, rows: u64) -> u64 {
        ELEMENT * rows * self.widths[self.widths.len() - 1]
    }

    fn kept_bytes(&self, rows: u64) -> u64 {
        self.in_bytes(rows) + ELEMENT * rows * self.widths.iter().sum::<u64>()
    }
}

fn linear_of_halves(builder: &mut GraphBuilder, input: ValueId, features: i64, name: &str) -> ValueId {
    let shape = [features, builder.shape(input)[1].fixed];
    let [weight, bias] = [("weight", &shape[..]), ("bias", &shape[..1])]
        .map(|(kind, shape)| builder.param(&format!("{name}.{kind}"), shape));
    let convert = vec![Arg::Value(weight), Arg::Torch("bfloat16".into())];
    builder.module(name).op_with("aten.to.dtype", convert, &[(DType::Bfloat16, shape.map(Dim::fixed).to_vec())]);
    let copy = builder.last_op().results[0];
    let operands = [input, copy, bias].map(Arg::Value).to_vec();
    builder.op("aten.linear.default", operands, &[Dim::rows(1), Dim::fixed(features)])
}

impl Case {
    /// Stages of three layers each under 1F1B, with 33 rows for 8 microbatches.
    fn uneven(stages: usize, replicas: usize, sharding: Sharding) -> Self {
        Self {
            widths: vec![vec![64, 48, 40]; stages],
            replicas: vec![replicas; stages],
            sharding: vec![sharding; stages],
            batch_rows: 8 * (stages * replicas) as u64 + 1,
            gather_inputs: true,
            microbatches: 8,
            schedule: ScheduleKind::OneForwardOneBackward,
            call: Call::Whole,
            half_digits: false,
        }
    }

    fn world_size(&self) -> usize {
        self.replicas.iter().sum()
    }

    fn layers(&self, stage: usize) -> Layers {
        let before = if stage == 0 { self.widths[0][0] } else { *self.widths[stage - 1].last().expect("a layer") };
        let widths = [before].into_iter().chain(self.widths[stage].iter().copied()).collect();
        Layers { widths, is_first: stage == 0, is_last: stage + 1 == self.widths.len() }
    }

    fn graph(&self) -> Graph {
        let mut builder = GraphBuilder::new("Layers");
        let fixed = |width: u64| Dim::fixed(i64::try_from(width).expect("small"));
        let mut hidden = builder.input(DType::Float32, &[Dim::rows(1), fixed(self.widths[0][0])]);
        for (layer, &width) in self.widths.iter().flatten().enumerate() {
            let name = format!("layers.{layer}");
            let width = i64::try_from(width).expect("small");
            hidden = if self.half_digits {
                linear_of_halves(&mut builder, hidden, width, &name)
            } else {
                builder.linear(hidden, width, &name)
            };
        }
        builder.finish(&[hidden])
    }

    fn rows_per_rank(&self) -> Vec<u64> {
        if self.gather_inputs {
            return split_even(self.batch_rows, self.world_size()).into_iter().map(Interval::rows).collect();
        }
        (0..self.world_size()).map(|rank| if rank == 0 { self.batch_rows } else { 0 }).collect()
    }

    /// Rows of each microbatch.
    fn microbatch_rows(&self) -> Vec<u64> {
        let mut rows = vec![0; self.microbatches as usize];
        for own in self.rows_per_rank() {
            split_even(own, rows.len()).iter().zip(&mut rows).for_each(|(part, sum)| *sum += part.rows());
        }
        rows
    }

    fn predicted(&self, stage: usize) -> StagePrediction {
        let (layers, replicas) = (self.layers(stage), self.replicas[stage] as u64);
        let with_rows = self.microbatch_rows().into_iter().filter(|&rows| rows > 0);
        let rows: Vec<u64> = with_rows.map(|rows| rows.div_ceil(replicas)).collect();
        let mut sizes = rows.clone();
        sizes.dedup();
        let depth = u32::try_from(self.widths.len() - stage).expect("few");
        let order: Order = self.schedule.order(depth, u32::try_from(rows.len()).expect("few")).collect();
        let held = order.in_flight();
        let grads_bytes = layers.in_bytes(rows[0]) + if layers.is_last { 0 } else { layers.out_bytes(rows[0]) };
        let outputs_bytes = if layers.is_last { rows.iter().map(|&rows| layers.out_bytes(rows)).sum() } else { 0 };
        let summed = layers.param_bytes(ELEMENT);
        let gathered = layers.param_bytes(if self.half_digits { ELEMENT / 2 } else { ELEMENT });
        StagePrediction {
            in_bytes: layers.in_bytes(rows[0]),
            memory: MemoryPrediction {
                activations_bytes: held * layers.kept_bytes(rows[0]),
                comm_bytes: layers.in_bytes(rows[0]) + 2 * grads_bytes + outputs_bytes,
                ..MemoryPrediction::default()
            },
            whole: match self.sharding[stage] {
                Sharding::None | Sharding::Optimizer => WholePrediction::default(),
                Sharding::Gradients => WholePrediction { params_bytes: 0, grads_bytes: summed.iter().sum() },
                Sharding::KeptParams => WholePrediction {
                    params_bytes: gathered.iter().sum(),
                    grads_bytes: summed_at_once(&summed, replicas),
                },
                Sharding::Params => {
                    WholePrediction { params_bytes: two_of(&gathered), grads_bytes: summed_at_once(&summed, replicas) }
                }
            },
            sizes: match sizes[..] {
                [_] => Vec::new(),
                _ => sizes.iter().map(|&rows| PassPrediction { rows, ..PassPrediction::default() }).collect(),
            },
            ..StagePrediction::default()
        }
    }

    fn plan(&self, graph: &Graph) -> Plan {
        let (mut op, mut rank) = (0.., 0..);
        let stage = |stage: usize| {
            let layers: Vec<u32> = op.by_ref().take(self.widths[stage].len()).collect();
            let run = |first: u32, last: u32| OpRun { first, end: last + 1 };
            let block = |&op: &u32| BlockPlan { ops: run(op, op), hash: "layer".into(), recompute: Recompute::None };
            StagePlan {
                ops: run(layers[0], layers[layers.len() - 1]),
                modules: vec!["layers".into()],
                ranks: rank.by_ref().take(self.replicas[stage]).collect(),
                blocks: layers.iter().map(block).collect(),
                feeds: None,
                sharding: self.sharding[stage],
                offload: false,
                bucket_bytes: None,
                predicted: self.predicted(stage),
            }
        };
        let plan = Plan {
            schema: PLAN_SCHEMA,
            pyrannc: String::new(),
            graph_hash: graph.hash(),
            graph_name: graph.name.clone(),
            precision: String::new(),
            world_size: u32::try_from(self.world_size()).expect("few"),
            batch_rows: self.batch_rows,
            microbatches: self.microbatches,
            schedule: self.schedule.into(),
            stages: (0..self.widths.len()).map(stage).collect(),
            eager_spans: Vec::new(),
            memory_budget_percent: None,
            predicted: StepPrediction::default(),
            checksum: String::new(),
        };
        plan.seal().expect("the plan is consistent")
    }

    fn promised(&self) -> Promised {
        self.promised_for(self.call, self.rows_per_rank())
    }

    /// The Plan with a batch that it may not have been made for.
    fn promised_for(&self, call: Call, rows_per_rank: Vec<u64>) -> Promised {
        let graph = self.graph();
        let plan = self.plan(&graph);
        let partition = plan.partition(&graph).expect("any layer may be the last of its Stage");
        let buckets = Buckets::of(&graph, &partition, &plan.placement(), &Trained::captured(&graph));
        let batch = Batch { rows_per_rank, gather_inputs: self.gather_inputs };
        let program = build(&plan.placement(), &partition, &buckets, &batch, call).expect("the case is sound");
        Promised { promises: Promises::new(&plan, &graph, &partition), program, partition, buckets }
    }
}

/// A Program, and what its Plan promises.
struct Promised {
    program: Program,
    partition: Partition,
    buckets: Buckets,
    promises: Promises,
}

impl Promised {
    fn memory(&self) -> Result<(), CheckError> {
        assert_eq!(check(&self.program, &self.partition, &self.buckets.gradients), Ok(()));
        check_memory(&self.program, &self.partition, &self.promises)
    }

    /// What is found to take too much after a change that makes no result wrong.
    fn changed(mut self, change: Change) -> Option<Holding> {
        assert_eq!(self.memory(), Ok(()));
        for own in &mut self.program.ranks {
            change(&mut own.forward);
            change(&mut own.backward);
        }
        match self.memory() {
            Ok(()) => None,
            Err(CheckError::Memory { what, bytes, promised, .. }) if bytes > promised => Some(what),
            Err(other) => panic!("{other}"),
        }
    }
}

type Change = fn(&mut [Action]);

/// The forward that follows the first backward comes before it.
fn forward_earlier(actions: &mut [Action]) {
    let backward = actions.iter().position(|action| *action == Action::Backward { mb: 0, stage: None });
    let Some(backward) = backward else { return };
    if let Some(next) = (backward..actions.len()).find(|&next| matches!(actions[next], Action::Forward { .. })) {
        actions[backward..=next].rotate_right(1);
    }
}

/// Stable sorts: each kind of Action stays in its order.
fn values_first(actions: &mut [Action]) {
    actions.sort_by_key(|action| !matches!(action, Action::Recv(message) if message.kind == Payload::Value));
}

fn gradients_first(actions: &mut [Action]) {
    actions.sort_by_key(|action| !matches!(action, Action::Recv(message) if message.kind == Payload::Grad));
}

/// One Span of the second microbatch is gathered before the forward of the first.
fn gather_ahead(actions: &mut [Action]) {
    let forward = actions.iter().position(|action| *action == Action::Forward { mb: 0, stage: None });
    let next = actions.iter().position(|action| matches!(action, Action::AllGather { mb: 1, .. }));
    if let (Some(forward), Some(next)) = (forward, next) {
        actions[forward..=next].rotate_right(1);
    }
}

/// What fills first is summed last.
fn first_sums(actions: &mut [Action]) -> Vec<&mut Action> {
    actions.iter_mut().filter(|action| matches!(action, Action::ReduceScatter { mb: 0, .. })).collect()
}

fn sum_in_reverse(actions: &mut [Action]) {
    let mut sums = first_sums(actions);
    let reversed: Vec<Action> = sums.iter().rev().map(|sum| (**sum).clone()).collect();
    sums.iter_mut().zip(reversed).for_each(|(place, sum)| **place = sum);
}

fn sum_the_second_first(actions: &mut [Action]) {
    let mut sums = first_sums(actions);
    if let [first, second, ..] = &mut sums[..] {
        std::mem::swap(*first, *second);
    }
}

#[test]
fn one_more_of_uneven_microbatches_is_found() {
    let changes: [Change; 3] = [forward_earlier, values_first, gradients_first];
    for replicas in [1, 2] {
        for change in changes {
            let case = Case::uneven(3, replicas, Sharding::None);
            assert_eq!(case.promised().changed(change), Some(Holding::Activations));
        }
    }
}

/// Three ranks bring four rows each at most for eight microbatches: four have none.
#[test]
fn empty_microbatches_count_for_nothing() {
    let case = Case { batch_rows: 11, ..Case::uneven(3, 1, Sharding::None) };
    assert_eq!(case.microbatch_rows(), [3, 3, 3, 2, 0, 0, 0, 0]);
    assert_eq!(case.promised().changed(forward_earlier), Some(Holding::Activations));
}

/// Values may come first: between the halves a rank has all of them.
#[test]
fn too_many_messages_of_a_call_in_halves_are_found() {
    let even = Case { batch_rows: 48, ..Case::uneven(3, 2, Sharding::None) };
    for case in [even, Case::uneven(3, 2, Sharding::None)] {
        let case = Case { schedule: ScheduleKind::FillDrain, call: Call::Halves, ..case };
        assert_eq!(case.promised().changed(values_first), None);
        assert_eq!(case.promised().changed(gradients_first), Some(Holding::Activations));
    }
}

#[test]
fn a_span_gathered_too_early_is_found_whatever_the_batch() {
    let case = Case::uneven(2, 2, Sharding::Params);
    for half_digits in [false, true] {
        let case = Case { half_digits, ..case.clone() };
        assert_eq!(case.promised().changed(gather_ahead), Some(Holding::Params));
    }
    for call in [Call::Forward, Call::Whole, Call::Halves] {
        let promised = case.promised_for(call, vec![9, 0, 5, 8]);
        assert_eq!(promised.changed(gather_ahead), Some(Holding::Params), "{call}");
    }
}

#[test]
fn sums_that_keep_buckets_waiting_are_found_whatever_the_batch() {
    let case = Case::uneven(2, 2, Sharding::Params);
    let changes: [Change; 2] = [sum_in_reverse, sum_the_second_first];
    for change in changes {
        assert_eq!(case.promised().changed(change), Some(Holding::Gradients));
    }
    for call in [Call::Whole, Call::Halves] {
        let promised = case.promised_for(call, vec![9, 0, 5, 8]);
        assert_eq!(promised.changed(sum_in_reverse), Some(Holding::Gradients), "{call}");
    }
}

/// While the first bucket of a Span fills, all of those of the Span behind it are under way. A Plan that promises less than
/// any order takes is not held to it.
#[test]
fn what_sums_take_is_known_to_the_byte() {
    for half_digits in [false, true] {
        let case = Case { half_digits, ..Case::uneven(2, 2, Sharding::Params) };
        let graph = case.graph();
        let promising = |less: u64| {
            let (mut plan, promised) = (case.plan(&graph), case.promised());
            for (stage, widths) in case.widths.iter().enumerate() {
                let summed = case.layers(stage).param_bytes(ELEMENT);
                // The biases beside weights of halves have a bucket of their own, which is full first.
                let first = |layer: usize| if half_digits { ELEMENT * widths[layer] } else { summed[layer] };
                let needed = (1..summed.len()).map(|layer| first(layer - 1) + summed[layer] + summed[layer] / 2).max();
                plan.stages[stage].predicted.whole.grads_bytes = needed.expect("two layers") - less;
            }
            Promised { promises: Promises::new(&plan, &graph, &promised.partition), ..promised }
        };
        assert_eq!(promising(0).changed(sum_in_reverse), Some(Holding::Gradients));
        assert_eq!(promising(1).changed(sum_in_reverse), None);
    }
}

/// Of other rows, and of halves under a Schedule for whole calls, nothing is promised of activations.
#[test]
fn a_plan_promises_what_it_was_made_for() {
    let case = Case::uneven(3, 1, Sharding::None);
    assert_eq!(case.promised_for(Call::Whole, vec![9, 9, 8]).changed(values_first), None);
    assert_eq!(case.promised_for(Call::Halves, case.rows_per_rank()).changed(values_first), None);
}

/// Six microbatches of three rows and two, which the Replicas divide otherwise: a rank has gradients of both under way.
#[test]
fn gradients_that_go_elsewhere_are_not_promised() {
    let case = Case {
        widths: vec![vec![9], vec![1]],
        replicas: vec![2, 3],
        sharding: vec![Sharding::None; 2],
        batch_rows: 14,
        gather_inputs: false,
        microbatches: 6,
        ..Case::uneven(2, 1, Sharding::None)
    };
    assert_eq!(case.promised().memory(), Ok(()));
}

fn cases() -> impl Strategy<Value = Case> {
    let stage = (vec(1..40_u64, 1..5), 1..4_usize, prop::sample::select(Sharding::ALL.to_vec()));
    let calls = prop_oneof![
        Just((ScheduleKind::FillDrain, Call::Halves)),
        Just((ScheduleKind::FillDrain, Call::Whole)),
        Just((ScheduleKind::OneForwardOneBackward, Call::Whole)),
    ];
    let rows = (any::<bool>(), 1..7_u32, 0..80_u64);
    (vec(stage, 1..5), rows, calls, any::<bool>()).prop_map(|(stages, rows, (schedule, call), half_digits)| {
        let (gather_inputs, microbatches, more_rows) = rows;
        let replicas: Vec<usize> = stages.iter().map(|stage| stage.1).collect();
        let divided = stages.iter().map(|stage| if stage.1 > 1 { stage.2 } else { Sharding::None });
        Case {
            sharding: divided.collect(),
            widths: stages.iter().map(|stage| stage.0.clone()).collect(),
            batch_rows: u64::from(microbatches) + more_rows,
            gather_inputs,
            replicas,
            microbatches,
            schedule,
            call,
            half_digits,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_a_plan_promises_is_kept(case in cases()) {
        prop_assert_eq!(case.promised().memory(), Ok(()));
    }
}
