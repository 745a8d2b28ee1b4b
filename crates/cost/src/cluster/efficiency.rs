//! What share of its peak a device reaches, by kind of op and size of work.

use serde::Serialize;

/// Shares of a peak by the size of the work (floating-point operations, or bytes).
///
/// Between two points the time is linear in the work, as of a kernel with a start and a rate; before
/// the first and after the last point the share stays. Without points the share is one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Curve {
    points: Vec<(f64, f64)>,
}

impl Curve {
    /// A curve through (work, share) points.
    pub fn new(points: impl Into<Vec<(f64, f64)>>) -> Self {
        Self { points: points.into() }
    }

    /// The (work, share) points.
    pub fn points(&self) -> &[(f64, f64)] {
        &self.points
    }

    /// The work that takes as long at the peak as `work` takes in truth. Never negative, and never
    /// less for more work, if [`Curve::fault`] finds nothing.
    pub fn at_peak(&self, work: f64) -> f64 {
        let after = self.points.partition_point(|&(size, _)| size < work);
        let before = after.checked_sub(1).and_then(|index| self.points.get(index));
        match (before, self.points.get(after)) {
            (None, None) => work,
            (None, Some((_, share))) | (Some((_, share)), None) => work / share,
            (Some((less, less_share)), Some((more, more_share))) => {
                let (from, to) = (less / less_share, more / more_share);
                from + (to - from) * ((work - less) / (more - less))
            }
        }
    }

    /// What is wrong with the points: work and share must be positive, the work increase, and more
    /// work must not be done sooner.
    pub(crate) fn fault(&self) -> Option<String> {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        if let Some((work, share)) = self.points.iter().find(|(work, share)| !positive(*work) || !positive(*share)) {
            return Some(format!("holds the point [{work}, {share}], but work and share must be positive numbers"));
        }
        self.points.windows(2).find_map(|pair| {
            let ((less, less_share), (more, more_share)) = (pair[0], pair[1]);
            if less >= more {
                return Some(format!("must list its points by increasing work, but {more} follows {less}"));
            }
            (less / less_share > more / more_share).then(|| {
                format!(
                    "says that work of {more} at share {more_share} is done sooner than work of {less} at share \
                     {less_share}; leave one of them out"
                )
            })
        })
    }
}

/// Shares of an op kind that multiplies: of the device's peak FLOP/s by number class and
/// floating-point operations, and of its memory bandwidth by bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Products {
    /// float64.
    pub fp64: Curve,
    /// float32.
    pub fp32: Curve,
    /// float32 by way of TF32.
    pub tf32: Curve,
    /// float16 and bfloat16.
    pub half: Curve,
    /// Share of the memory bandwidth.
    pub bytes: Curve,
}

/// Shares by kind of op. Kinds that do not multiply have shares of the memory bandwidth, by bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Efficiency {
    /// Matrix products.
    pub matrix: Products,
    /// Convolutions.
    pub convolution: Products,
    /// Attention.
    pub attention: Products,
    /// Normalisations and softmax.
    pub normalisation: Curve,
    /// Everything that goes through its tensors once.
    pub pointwise: Curve,
    /// Looking up rows of tables.
    pub embedding: Curve,
    /// Optimizer steps.
    pub optimizer: Curve,
}

impl Efficiency {
    /// Every curve, as the file calls it.
    pub(crate) fn curves(&self) -> [(&'static str, &Curve); 19] {
        let Self { matrix, convolution, attention, normalisation, pointwise, embedding, optimizer } = self;
        [
            ("efficiency.matrix.fp64", &matrix.fp64),
            ("efficiency.matrix.fp32", &matrix.fp32),
            ("efficiency.matrix.tf32", &matrix.tf32),
            ("efficiency.matrix.half", &matrix.half),
            ("efficiency.matrix.bytes", &matrix.bytes),
            ("efficiency.convolution.fp64", &convolution.fp64),
            ("efficiency.convolution.fp32", &convolution.fp32),
            ("efficiency.convolution.tf32", &convolution.tf32),
            ("efficiency.convolution.half", &convolution.half),
            ("efficiency.convolution.bytes", &convolution.bytes),
            ("efficiency.attention.fp64", &attention.fp64),
            ("efficiency.attention.fp32", &attention.fp32),
            ("efficiency.attention.tf32", &attention.tf32),
            ("efficiency.attention.half", &attention.half),
            ("efficiency.attention.bytes", &attention.bytes),
            ("efficiency.normalisation", normalisation),
            ("efficiency.pointwise", pointwise),
            ("efficiency.embedding", embedding),
            ("efficiency.optimizer", optimizer),
        ]
    }

    /// The same, to be replaced.
    pub(crate) fn curves_mut(&mut self) -> [(&'static str, &mut Curve); 19] {
        let Self { matrix, convolution, attention, normalisation, pointwise, embedding, optimizer } = self;
        [
            ("efficiency.matrix.fp64", &mut matrix.fp64),
            ("efficiency.matrix.fp32", &mut matrix.fp32),
            ("efficiency.matrix.tf32", &mut matrix.tf32),
            ("efficiency.matrix.half", &mut matrix.half),
            ("efficiency.matrix.bytes", &mut matrix.bytes),
            ("efficiency.convolution.fp64", &mut convolution.fp64),
            ("efficiency.convolution.fp32", &mut convolution.fp32),
            ("efficiency.convolution.tf32", &mut convolution.tf32),
            ("efficiency.convolution.half", &mut convolution.half),
            ("efficiency.convolution.bytes", &mut convolution.bytes),
            ("efficiency.attention.fp64", &mut attention.fp64),
            ("efficiency.attention.fp32", &mut attention.fp32),
            ("efficiency.attention.tf32", &mut attention.tf32),
            ("efficiency.attention.half", &mut attention.half),
            ("efficiency.attention.bytes", &mut attention.bytes),
            ("efficiency.normalisation", normalisation),
            ("efficiency.pointwise", pointwise),
            ("efficiency.embedding", embedding),
            ("efficiency.optimizer", optimizer),
        ]
    }

    /// The first curve with a fault, and what is wrong with it.
    pub(crate) fn fault(&self) -> Option<(&'static str, String)> {
        self.curves().into_iter().find_map(|(field, curve)| Some((field, curve.fault()?)))
    }
}
