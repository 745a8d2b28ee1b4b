//! Program for Python.

use std::collections::BTreeSet;

use pyo3::prelude::*;
use rannc_ir::ParamId;
use rannc_plan::{Batch, Call, Division, ReduceDType, Trained};

use crate::errors::{ErrorClass, OrRaise, OrRaiseAs};
use crate::graph::Graph;
use crate::plan::{Partition, Plan};

/// Which gradients are summed together, over which ranks and in which order.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Buckets(rannc_plan::Buckets);

#[pymethods]
impl Buckets {
    /// Divides the gradients of a Graph: of the trained Params, those of `everywhere` are held by every rank. They are
    /// summed over ranks in type `reduce_dtype`: "float32", "bfloat16" or "param". Of `undivided` Params nothing is
    /// divided among Replicas, and of `whole_gradients` not the gradients. With `by_element` buckets are divided
    /// anywhere, else between Params.
    #[staticmethod]
    #[allow(clippy::too_many_arguments, reason = "in Python they have names")]
    #[pyo3(signature = (plan, partition, graph, *, trained, everywhere, reduce_dtype, undivided, whole_gradients, by_element))]
    fn divide(
        py: Python<'_>,
        plan: &Plan,
        partition: &Partition,
        graph: &Graph,
        trained: Vec<u32>,
        everywhere: Vec<u32>,
        reduce_dtype: &str,
        undivided: Vec<u32>,
        whole_gradients: Vec<u32>,
        by_element: bool,
    ) -> PyResult<Self> {
        let params = |numbers: Vec<u32>| -> PyResult<BTreeSet<ParamId>> {
            let known = |number| Some(ParamId(number)).filter(|&param| graph.0.params.get(param).is_some());
            let found: Option<BTreeSet<ParamId>> = numbers.into_iter().map(known).collect();
            found.ok_or_else(|| pyo3::exceptions::PyIndexError::new_err("the graph has no such parameter"))
        };
        let reduce = match reduce_dtype {
            "float32" => ReduceDType::Float32,
            "bfloat16" => ReduceDType::Bfloat16,
            "param" => ReduceDType::Param,
            _ => return Err(pyo3::exceptions::PyValueError::new_err("reduce_dtype is float32, bfloat16 or param")),
        };
        let trained = Trained {
            params: params(trained)?,
            everywhere: params(everywhere)?,
            reduce,
            undivided: params(undivided)?,
            whole_gradients: params(whole_gradients)?,
            division: if by_element { Division::Elements } else { Division::Params },
        };
        let placement = plan.0.placement();
        Ok(py.detach(|| Self(rannc_plan::Buckets::of(&graph.0, &partition.0, &placement, &trained))))
    }

    /// The JSON form.
    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).or_raise_as(ErrorClass::PLAN)
    }
}

/// What all ranks do for one batch, proven to end.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Program {
    program: rannc_plan::Program,
}

#[pymethods]
impl Program {
    /// Makes the Program of a batch and checks it. `call` is "forward", "whole" or "halves".
    #[staticmethod]
    fn build(
        py: Python<'_>,
        plan: &Plan,
        partition: &Partition,
        buckets: &Buckets,
        rows_per_rank: Vec<u64>,
        gather_inputs: bool,
        call: &str,
    ) -> PyResult<Self> {
        let call: Call = serde_json::from_value(call.into()).or_raise_as(ErrorClass::PLAN)?;
        py.detach(|| {
            let batch = Batch { rows_per_rank, gather_inputs };
            let program = rannc_plan::build(&plan.0.placement(), &partition.0, &buckets.0, &batch, call).or_raise()?;
            rannc_plan::check(&program, &partition.0, &buckets.0.gradients).or_raise()?;
            rannc_plan::check_memory(&program, &partition.0, &partition.1).or_raise()?;
            Ok(Self { program })
        })
    }

    /// One rank's part as JSON.
    fn rank_view(&self, rank: u32) -> PyResult<String> {
        let Some(view) = self.program.rank_view(rank) else {
            return Err(pyo3::exceptions::PyIndexError::new_err(format!("the program has no rank {rank}")));
        };
        serde_json::to_string(&view).or_raise_as(ErrorClass::PLAN)
    }

    /// The computations of all ranks, drawn over time.
    fn grid(&self) -> PyResult<String> {
        rannc_plan::grid(&self.program).or_raise()
    }
}
