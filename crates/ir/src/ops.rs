//! The table of operators: what each does to the rows of the batch. An operator that is not here has no rule, and
//! nothing is taken for granted of it.

/// An argument by its place and its name.
pub(crate) type Slot = (usize, &'static str);

/// What a reduction makes of rows that it reduces over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// The sum over all rows is the sum of the parts' sums.
    Sum,
    /// The mean over all rows is the mean of the parts' means, by their rows.
    Mean,
    /// The parts' results do not tell that of the whole.
    Other,
}

/// How the rows of operands become rows of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowRule {
    /// Each element is made of those in the same place of the operands, after broadcasting.
    Elementwise,
    /// The first operand as it is, maybe as another type or elsewhere.
    Identity,
    /// The elements in the same order with other extents.
    Regroup,
    /// More extents on the left, or 1 made larger.
    Expand,
    /// Each dimension so many times.
    Repeat,
    /// Each element along a dimension so many times.
    RepeatInterleave,
    /// Two dimensions changed places; none given: the last two.
    Transpose,
    /// Dimensions in another order.
    Permute,
    /// Dimensions moved to other places.
    MoveDim,
    /// One place of a dimension, or all of them as results of their own.
    Drop(Slot),
    /// Some places of a dimension, in order.
    Section(Slot),
    /// Tensors one after another along a dimension.
    Cat,
    /// Likewise, along the second dimension, or the only one.
    Beside,
    /// Tensors beside each other along a new dimension.
    Stack,
    /// One value for all places of some dimensions; none given: of all.
    Reduce {
        /// The dimensions.
        dims: Slot,
        /// Whether they stay with extent 1.
        keep: Option<Slot>,
        /// What it makes of rows.
        over: Over,
    },
    /// The places along some dimensions are used together; extents may change there only.
    Along {
        /// The dimensions.
        dims: Slot,
        /// Where none are given; `None` for all of them, as one.
        default: Option<i64>,
    },
    /// The last dimensions, as many as the list has items, are used together.
    Trailing(Slot),
    /// The last dimensions, this many, are used together.
    Last(usize),
    /// Every operand with rows has them in dimension 0, and so has the result.
    Leading,
    /// Attention over the last dimension but one: like [`RowRule::Leading`] where there is a dimension before it.
    Attention,
    /// A convolution: like [`RowRule::Leading`] where the input has a batch dimension.
    Convolution,
    /// Batch normalisation: statistics are those of the rows in hand, as documented.
    BatchNorm,
    /// A recurrent network with `batch_first` as the last argument.
    Recurrent,
    /// Padding of the last dimensions.
    Pad,
    /// The angle between vectors along a dimension of two tensors, which are broadcast.
    Cosine,
    /// Each element of one operand by itself, looked up in others without rows.
    LookUp(usize),
    /// Places of a dimension, chosen by a list of numbers.
    IndexSelect,
    /// Elements of one dimension by indices, which may have the rows where the table has none.
    Gather,
    /// A table looked up by indices.
    Embedding,
    /// A dimension more on the right.
    OneHot,
    /// Advanced indexing.
    Index,
    /// Advanced indexing to write.
    IndexPut,
    /// A product with a parameter over the last dimension.
    Linear,
    /// A product over the last dimension of one and the last but one of the other.
    Matmul,
    /// A product to which the first operand is added.
    AddMatmul,
    /// A product by an equation.
    Einsum,
    /// A product over pairs of dimensions, which are listed.
    Tensordot,
    /// All products of an element of one and an element of the other.
    Outer,
    /// Made from extents alone.
    Create,
    /// The numbers from 0.
    Arange,
    /// A loss of elements, with `reduction` there.
    Loss(Slot),
    /// A loss of classes in dimension 1; its mean is over targets that are not ignored.
    ClassLoss(Slot),
}

impl RowRule {
    /// True where an argument may be an extent, the batch's included.
    pub(crate) fn takes_extents(self) -> bool {
        matches!(
            self,
            Self::Regroup
                | Self::Expand
                | Self::Repeat
                | Self::RepeatInterleave
                | Self::Create
                | Self::Arange
                | Self::Section(_)
        )
    }
}

const DIM1: Slot = (1, "dim");
const REDUCE_DIM: RowRule = RowRule::Reduce { dims: DIM1, keep: Some((2, "keepdim")), over: Over::Other };

/// The rule of an operator of torch, or of `pyrannc` itself, by the name of its packet, e.g. `add` of
/// `aten.add.Tensor`.
pub(crate) fn row_rule(packet: &str) -> Option<RowRule> {
    let rule = of_name(packet);
    if rule.is_some() || packet.ends_with("__") {
        return rule;
    }
    // The variant that writes in place does the same.
    packet.strip_suffix('_').and_then(of_name)
}

fn of_name(name: &str) -> Option<RowRule> {
    use RowRule::{
        AddMatmul, Along, Arange, Attention, BatchNorm, Beside, Cat, ClassLoss, Convolution, Cosine, Create, Drop,
        Einsum, Elementwise, Embedding, Expand, Gather, Identity, Index, IndexPut, IndexSelect, Last, Leading, Linear,
        LookUp, Loss, Matmul, MoveDim, OneHot, Outer, Pad, Permute, Recurrent, Reduce, Regroup, Repeat,
        RepeatInterleave, Section, Stack, Tensordot, Trailing, Transpose,
    };
    Some(match name {
        "alias" | "clone" | "contiguous" | "detach" | "double" | "expand_copy" | "float" | "half" | "lift"
        | "lift_fresh" | "lift_fresh_copy" | "pin_memory" | "to" | "type_as" | "_to_copy" | "resolve_conj"
        | "resolve_neg" | "view_as_real" | "view_as_complex" | "_conj" | "conj" | "real" | "imag" => Identity,
        "__and__"
        | "__iand__"
        | "__ilshift__"
        | "__ior__"
        | "__irshift__"
        | "__ixor__"
        | "__lshift__"
        | "__or__"
        | "__rshift__"
        | "__xor__"
        | "abs"
        | "absolute"
        | "acos"
        | "acosh"
        | "add"
        | "addcdiv"
        | "addcmul"
        | "angle"
        | "arccos"
        | "arcsin"
        | "arctan"
        | "arctan2"
        | "as_valid"
        | "asin"
        | "asinh"
        | "atan"
        | "atan2"
        | "atanh"
        | "bitwise_and"
        | "bitwise_left_shift"
        | "bitwise_not"
        | "bitwise_or"
        | "bitwise_right_shift"
        | "bitwise_xor"
        | "broadcast_tensors"
        | "ceil"
        | "celu"
        | "clamp"
        | "clamp_max"
        | "clamp_min"
        | "clip"
        | "complex"
        | "conj_physical"
        | "copy"
        | "copysign"
        | "cos"
        | "cosh"
        | "deg2rad"
        | "digamma"
        | "div"
        | "divide"
        | "elu"
        | "empty_like"
        | "eq"
        | "erf"
        | "erfc"
        | "erfinv"
        | "exp"
        | "exp2"
        | "expm1"
        | "fake_quantize_per_tensor_affine"
        | "fill"
        | "fix"
        | "float_power"
        | "floor"
        | "floor_divide"
        | "fmax"
        | "fmin"
        | "fmod"
        | "frac"
        | "frexp"
        | "full_like"
        | "gcd"
        | "ge"
        | "gelu"
        | "greater"
        | "greater_equal"
        | "gt"
        | "hardshrink"
        | "hardsigmoid"
        | "hardswish"
        | "hardtanh"
        | "heaviside"
        | "hypot"
        | "i0"
        | "igamma"
        | "igammac"
        | "isclose"
        | "isfinite"
        | "isinf"
        | "isnan"
        | "isneginf"
        | "isposinf"
        | "isreal"
        | "lcm"
        | "ldexp"
        | "le"
        | "leaky_relu"
        | "lerp"
        | "less"
        | "less_equal"
        | "lgamma"
        | "log"
        | "log10"
        | "log1p"
        | "log2"
        | "log_sigmoid"
        | "logaddexp"
        | "logaddexp2"
        | "logical_and"
        | "logical_not"
        | "logical_or"
        | "logical_xor"
        | "logit"
        | "lt"
        | "masked_fill"
        | "maximum"
        | "minimum"
        | "mish"
        | "mul"
        | "multiply"
        | "mvlgamma"
        | "nan_to_num"
        | "ne"
        | "neg"
        | "negative"
        | "nextafter"
        | "not_equal"
        | "ones_like"
        | "polar"
        | "polygamma"
        | "positive"
        | "pow"
        | "rad2deg"
        | "reciprocal"
        | "relu"
        | "relu6"
        | "remainder"
        | "round"
        | "rrelu"
        | "rsqrt"
        | "rsub"
        | "selu"
        | "sgn"
        | "sigmoid"
        | "sign"
        | "signbit"
        | "silu"
        | "sin"
        | "sinc"
        | "sinh"
        | "softplus"
        | "softshrink"
        | "special_entr"
        | "special_erf"
        | "special_erfc"
        | "special_erfinv"
        | "special_exp2"
        | "special_expit"
        | "special_expm1"
        | "special_log1p"
        | "special_logit"
        | "special_ndtr"
        | "special_xlog1py"
        | "special_xlogy"
        | "sqrt"
        | "square"
        | "sub"
        | "subtract"
        | "tan"
        | "tanh"
        | "threshold"
        | "true_divide"
        | "trunc"
        | "where"
        | "xlogy"
        | "zero"
        | "zeros_like" => Elementwise,
        "alpha_dropout" | "bernoulli" | "cauchy" | "dropout" | "exponential" | "geometric" | "log_normal"
        | "native_dropout" | "normal" | "normal_functional" | "poisson" | "rand_like" | "randint_like"
        | "randn_like" | "random" | "uniform" => Elementwise,
        "feature_dropout" | "feature_alpha_dropout" => Leading,
        "_reshape_alias" | "_reshape_copy" | "_unsafe_view" | "atleast_1d" | "flatten" | "ravel" | "reshape"
        | "reshape_as" | "squeeze" | "unflatten" | "unsqueeze" | "view" | "view_as" | "view_copy" => Regroup,
        "broadcast_to" | "expand" | "expand_as" => Expand,
        "repeat" | "tile" => Repeat,
        "repeat_interleave" => RepeatInterleave,
        "adjoint" | "mH" | "mT" | "matrix_H" | "numpy_T" | "swapaxes" | "swapdims" | "t" | "transpose" => Transpose,
        "permute" => Permute,
        "moveaxis" | "movedim" => MoveDim,
        "select" | "unbind" => Drop(DIM1),
        "narrow" | "slice" | "slice_copy" => Section(DIM1),
        "chunk" | "split" | "split_with_sizes" | "tensor_split" | "unsafe_chunk" | "unsafe_split" => {
            Section((2, "dim"))
        }
        "cat" | "concat" | "concatenate" => Cat,
        "stack" => Stack,
        "hstack" => Beside,
        "sum" | "nansum" => Reduce { dims: DIM1, keep: Some((2, "keepdim")), over: Over::Sum },
        "mean" => Reduce { dims: DIM1, keep: Some((2, "keepdim")), over: Over::Mean },
        "all" | "amax" | "amin" | "any" | "argmax" | "argmin" | "logsumexp" | "max" | "median" | "min" | "mode"
        | "nanmean" | "nanmedian" | "prod" | "special_logsumexp" => REDUCE_DIM,
        "count_nonzero" => Reduce { dims: DIM1, keep: None, over: Over::Sum },
        "kthvalue" => Reduce { dims: (2, "dim"), keep: Some((3, "keepdim")), over: Over::Other },
        "linalg_norm" | "linalg_vector_norm" | "norm" => {
            Reduce { dims: (2, "dim"), keep: Some((3, "keepdim")), over: Over::Other }
        }
        "std" | "std_mean" | "var" | "var_mean" => Reduce { dims: DIM1, keep: Some((3, "keepdim")), over: Over::Other },
        "cosine_similarity" => Cosine,
        "bucketize" => LookUp(0),
        "searchsorted" | "take" => LookUp(1),
        "index_select" => IndexSelect,
        "gather" => Gather,
        "argsort"
        | "cumprod"
        | "cumsum"
        | "cummax"
        | "cummin"
        | "flip"
        | "glu"
        | "index_add"
        | "index_copy"
        | "index_fill"
        | "log_softmax"
        | "logcumsumexp"
        | "scatter"
        | "scatter_add"
        | "scatter_reduce"
        | "softmax"
        | "softmin"
        | "sort"
        | "special_log_softmax"
        | "special_softmax"
        | "unfold"
        | "_log_softmax"
        | "_softmax" => Along { dims: DIM1, default: Some(-1) },
        "diff" | "topk" | "fft_fft" | "fft_hfft" | "fft_ifft" | "fft_ihfft" | "fft_irfft" | "fft_rfft" => {
            Along { dims: (2, "dim"), default: Some(-1) }
        }
        "fft_fftn" | "fft_ifftn" | "fft_irfftn" | "fft_rfftn" | "fft_fft2" | "fft_ifft2" | "fft_irfft2"
        | "fft_rfft2" => Along { dims: (2, "dim"), default: None },
        "roll" => Along { dims: (2, "dims"), default: None },
        "fft_fftshift" | "fft_ifftshift" => Along { dims: DIM1, default: None },
        "select_scatter" | "slice_scatter" => Along { dims: (2, "dim"), default: Some(0) },
        "layer_norm" | "native_layer_norm" | "rms_norm" | "_fused_rms_norm" => Trailing((1, "normalized_shape")),
        "cholesky_inverse" | "diag_embed" | "inverse" | "linalg_cholesky" | "linalg_det" | "linalg_eigh"
        | "linalg_eigvalsh" | "linalg_inv" | "linalg_matrix_exp" | "linalg_qr" | "linalg_slogdet" | "linalg_solve"
        | "linalg_svd" | "logdet" | "matrix_exp" | "tril" | "triu" | "cdist" => Last(2),
        "multinomial" => Last(1),
        "_native_multi_head_attention"
        | "affine_grid_generator"
        | "channel_shuffle"
        | "col2im"
        | "grid_sampler"
        | "grid_sampler_2d"
        | "grid_sampler_3d"
        | "group_norm"
        | "im2col"
        | "instance_norm"
        | "native_group_norm"
        | "pairwise_distance"
        | "pixel_shuffle"
        | "pixel_unshuffle"
        | "prelu"
        | "bilinear"
        | "lp_pool2d" => Leading,
        // Each channel by itself too.
        "adaptive_avg_pool1d"
        | "adaptive_max_pool1d"
        | "avg_pool1d"
        | "max_pool1d"
        | "reflection_pad1d"
        | "replication_pad1d"
        | "upsample_linear1d"
        | "upsample_nearest1d" => Last(1),
        "_adaptive_avg_pool2d"
        | "adaptive_avg_pool2d"
        | "adaptive_max_pool2d"
        | "avg_pool2d"
        | "max_pool2d"
        | "max_pool2d_with_indices"
        | "max_unpool2d"
        | "reflection_pad2d"
        | "replication_pad2d"
        | "upsample_bicubic2d"
        | "upsample_bilinear2d"
        | "upsample_nearest2d"
        | "_upsample_bicubic2d_aa"
        | "_upsample_bilinear2d_aa"
        | "_upsample_nearest_exact2d" => Last(2),
        "_adaptive_avg_pool3d"
        | "adaptive_avg_pool3d"
        | "adaptive_max_pool3d"
        | "avg_pool3d"
        | "max_pool3d"
        | "max_pool3d_with_indices"
        | "reflection_pad3d"
        | "replication_pad3d"
        | "upsample_nearest3d"
        | "upsample_trilinear3d" => Last(3),
        "_scaled_dot_product_attention_math"
        | "_scaled_dot_product_efficient_attention"
        | "_scaled_dot_product_flash_attention"
        | "_scaled_dot_product_flash_attention_for_cpu"
        | "scaled_dot_product_attention" => Attention,
        "conv1d" | "conv2d" | "conv3d" | "conv_transpose1d" | "conv_transpose2d" | "conv_transpose3d"
        | "convolution" | "_convolution" | "cudnn_convolution" | "thnn_conv2d" | "mkldnn_convolution" => Convolution,
        "batch_norm" | "native_batch_norm" | "cudnn_batch_norm" | "_batch_norm_with_update" => BatchNorm,
        "gru" | "lstm" | "rnn_relu" | "rnn_tanh" => Recurrent,
        "gru_cell" | "lstm_cell" | "rnn_relu_cell" | "rnn_tanh_cell" => Leading,
        "constant_pad_nd" | "pad" => Pad,
        "embedding" => Embedding,
        "one_hot" => OneHot,
        "index" | "_unsafe_index" => Index,
        "index_put" | "_unsafe_index_put" => IndexPut,
        "linear" => Linear,
        "bmm" | "linalg_matmul" | "matmul" | "mm" | "mv" | "dot" => Matmul,
        "addmm" | "addmv" | "baddbmm" => AddMatmul,
        "einsum" => Einsum,
        "tensordot" => Tensordot,
        "outer" | "ger" => Outer,
        "empty" | "empty_permuted" | "empty_strided" | "eye" | "full" | "hann_window" | "linspace" | "logspace"
        | "new_empty" | "new_empty_strided" | "new_full" | "new_ones" | "new_zeros" | "ones" | "rand" | "randint"
        | "randn" | "scalar_tensor" | "tril_indices" | "triu_indices" | "zeros" => Create,
        "arange" => Arange,
        "binary_cross_entropy" => Loss((3, "reduction")),
        "binary_cross_entropy_with_logits" => Loss((4, "reduction")),
        "huber_loss" | "kl_div" | "l1_loss" | "mse_loss" | "smooth_l1_loss" | "soft_margin_loss" => {
            Loss((2, "reduction"))
        }
        "hinge_embedding_loss" => Loss((3, "reduction")),
        "margin_ranking_loss" => Loss((4, "reduction")),
        "poisson_nll_loss" => Loss((5, "reduction")),
        "cross_entropy_loss" | "nll_loss" | "nll_loss2d" | "nll_loss_nd" => ClassLoss((3, "reduction")),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_in_place_have_the_rule_of_the_others() {
        assert_eq!(row_rule("add_"), Some(RowRule::Elementwise));
        assert_eq!(row_rule("index_put_"), Some(RowRule::IndexPut));
        assert_eq!(row_rule("__and__"), Some(RowRule::Elementwise));
        assert_eq!(row_rule("nonzero"), None);
        assert_eq!(row_rule("_"), None);
    }
}
