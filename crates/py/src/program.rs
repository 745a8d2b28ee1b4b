//! Program for Python.

use pyo3::prelude::*;
use rannc_plan::{Batch, Call};

use crate::errors::{ErrorClass, OrRaise, OrRaiseAs};
use crate::plan::{Partition, Plan};

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
        rows_per_rank: Vec<u64>,
        gather_inputs: bool,
        call: &str,
    ) -> PyResult<Self> {
        let call: Call = serde_json::from_value(call.into()).or_raise_as(ErrorClass::PLAN)?;
        py.detach(|| {
            let batch = Batch { rows_per_rank, gather_inputs };
            let program = rannc_plan::build(&plan.0.placement(), &partition.0, &batch, call).or_raise()?;
            rannc_plan::check(&program, &partition.0).or_raise()?;
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
