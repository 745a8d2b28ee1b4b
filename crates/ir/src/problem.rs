//! What the verifier finds: broken promises and where they stand.

use std::fmt;

use thiserror::Error;

use crate::graph::{BufferId, ConstId, Dim, OpPlace, ParamId, SCHEMA, ValueDef, ValueId};

pub(crate) const MAX_SAMPLE_ROWS: u64 = 1 << 30;
pub(crate) const MAX_PER_ROW: u64 = 1 << 32;
pub(crate) const MAX_FIXED: u64 = 1 << 48;
pub(crate) const MAX_LIST_DEPTH: usize = 32;

/// One broken promise and where it stands.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{place}: {problem}")]
pub struct VerifyError {
    /// Where.
    pub place: GraphPlace,
    /// What.
    pub problem: GraphProblem,
}

/// A place in a Graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GraphPlace {
    /// The Graph itself.
    Graph,
    /// A Value.
    Value(ValueId),
    /// An Op.
    Op(OpPlace),
    /// A Param.
    Param(ParamId),
    /// A Buffer.
    Buffer(BufferId),
    /// A Constant.
    Constant(ConstId),
    /// An input, by index.
    Input(usize),
    /// An output, by index.
    Output(usize),
}

impl fmt::Display for GraphPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Graph => write!(f, "graph"),
            Self::Value(id) => write!(f, "{id}"),
            Self::Op(place) => write!(f, "{place}"),
            Self::Param(id) => write!(f, "{id}"),
            Self::Buffer(id) => write!(f, "{id}"),
            Self::Constant(id) => write!(f, "{id}"),
            Self::Input(index) => write!(f, "input {index}"),
            Self::Output(index) => write!(f, "output {index}"),
        }
    }
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GraphProblem {
    /// Another schema.
    #[error("schema version {0} is not {SCHEMA}")]
    Schema(u32),
    /// No or too many sample rows.
    #[error("{0} sample rows are not from 1 to {MAX_SAMPLE_ROWS}")]
    SampleRows(u64),
    /// An id of no Value.
    #[error("there is no value {0}")]
    NoSuchValue(ValueId),
    /// The owner does not name this Value.
    #[error("its def names {0}, which does not name it back")]
    NotNamedBack(&'static str),
    /// The Value's def names something else.
    #[error("{0} belongs to something else: {1:?}")]
    NotOwned(ValueId, ValueDef),
    /// Result places do not increase.
    #[error("{0} stands at a place of the returned tuple that does not increase")]
    ResultOrder(ValueId),
    /// An operand that is not there yet.
    #[error("{0} is used before it is made")]
    UsedBeforeMade(ValueId),
    /// A changed Value that is no operand, or stands twice.
    #[error("{0} is changed in place but is no operand, or is listed twice")]
    MutatesNoOperand(ValueId),
    /// A storage of a later Value.
    #[error("it shares the storage of {0}, which is not earlier")]
    AliasNotEarlier(ValueId),
    /// A missing name.
    #[error("it has an empty name")]
    EmptyName,
    /// A name that something else has.
    #[error("the name {0:?} stands twice")]
    DuplicateName(String),
    /// A dimension out of limits.
    #[error("the dimension {0:?} is out of limits")]
    Dimension(Dim),
    /// Too many bytes.
    #[error("the tensor has too many bytes")]
    TooLarge,
    /// A stored tensor whose shape depends on the batch.
    #[error("its shape depends on the batch")]
    BatchDependent,
    /// Constant data that is no base64.
    #[error("its data is not base64")]
    NotBase64,
    /// Constant data of another length.
    #[error("its data has {found} bytes, its shape and type say {expected}")]
    DataLength {
        /// Bytes in the text.
        found: u64,
        /// Bytes of the tensor.
        expected: u64,
    },
    /// A gradient for an integer.
    #[error("its type {0} carries no gradient")]
    NotDifferentiable(crate::DType),
    /// A float argument that is none.
    #[error("{0:?} is no float as Python writes it")]
    NotAFloat(String),
    /// Lists in lists in lists.
    #[error("its arguments nest more than {MAX_LIST_DEPTH} deep")]
    TooDeep,
    /// An Op that calls nothing.
    #[error("it has no target")]
    NoTarget,
    /// Line 0.
    #[error("source lines count from 1")]
    SourceLine,
}

/// Everything that the verifier found.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub struct VerifyErrors(pub Vec<VerifyError>);

impl fmt::Display for VerifyErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        for (index, error) in self.0.iter().take(SHOWN).enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{error}")?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}
