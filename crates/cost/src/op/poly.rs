//! Quantities that grow with the rows of a batch.

use std::ops::{Add, AddAssign, Mul};

use rannc_ir::Dim;

const COEFFICIENTS: usize = 4;

/// A polynomial in the number of rows, of degree three at most. Its value is never negative.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Poly {
    coefficients: [f64; COEFFICIENTS],
}

impl Poly {
    /// The same for every number of rows.
    pub fn fixed(amount: f64) -> Self {
        Self::affine(amount, 0.0)
    }

    /// `fixed + per_row * rows`.
    pub fn affine(fixed: f64, per_row: f64) -> Self {
        Self { coefficients: [fixed, per_row, 0.0, 0.0] }
    }

    /// One extent of a tensor.
    pub fn extent(dim: Dim) -> Self {
        Self::affine(dim.fixed as f64, dim.per_row as f64)
    }

    /// Number of elements of a tensor. Batch-dependent extents after the third are taken at one row.
    pub fn elements(shape: &[Dim]) -> Self {
        let mut batch_dims = 0;
        shape.iter().fold(Self::fixed(1.0), |product, &dim| {
            batch_dims += usize::from(dim.per_row != 0);
            let representable = dim.per_row == 0 || batch_dims < COEFFICIENTS;
            product * if representable { Self::extent(dim) } else { Self::fixed(dim.at(1) as f64) }
        })
    }

    /// The amount for `rows` rows.
    pub fn at(&self, rows: u64) -> f64 {
        let rows = rows as f64;
        self.coefficients.iter().rev().fold(0.0, |sum, coefficient| sum * rows + coefficient).max(0.0)
    }

    /// The straight line through the amounts for 0 and for `rows` rows, as (fixed, per row): for all
    /// counts between it is exact for affine amounts and no less than convex ones.
    pub fn chord(&self, rows: u64) -> (f64, f64) {
        let fixed = self.at(0);
        (fixed, (self.at(rows) - fixed).max(0.0) / rows.max(1) as f64)
    }
}

impl Add for Poly {
    type Output = Self;
    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl AddAssign for Poly {
    fn add_assign(&mut self, other: Self) {
        for (sum, term) in self.coefficients.iter_mut().zip(other.coefficients) {
            *sum += term;
        }
    }
}

impl Mul<f64> for Poly {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        Self { coefficients: self.coefficients.map(|coefficient| coefficient * factor) }
    }
}

impl Mul for Poly {
    type Output = Self;
    /// The product; terms beyond the third degree, which [`Poly::elements`] never makes, are kept
    /// at the third.
    fn mul(self, other: Self) -> Self {
        let mut product = Self::default();
        for (i, left) in self.coefficients.iter().enumerate() {
            for (j, right) in other.coefficients.iter().enumerate() {
                product.coefficients[(i + j).min(COEFFICIENTS - 1)] += left * right;
            }
        }
        product
    }
}

impl std::iter::Sum for Poly {
    fn sum<I: Iterator<Item = Self>>(terms: I) -> Self {
        terms.fold(Self::default(), Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_follow_the_shape() {
        let poly = Poly::elements(&[Dim::rows(2), Dim::fixed(3), Dim { per_row: 1, fixed: 1 }]);
        for rows in 0..5_u64 {
            assert_eq!(poly.at(rows), (2 * rows * 3 * (rows + 1)) as f64);
        }
        assert_eq!(Poly::elements(&[]).at(7), 1.0);
    }

    #[test]
    fn the_fourth_batch_dimension_is_taken_at_one_row() {
        assert_eq!(Poly::elements(&[Dim::rows(1), Dim::rows(1), Dim::rows(1), Dim::rows(5)]).at(2), 40.0);
    }

    #[test]
    fn a_chord_is_exact_for_affine_amounts() {
        assert_eq!(Poly::affine(3.0, 2.0).chord(8), (3.0, 2.0));
        let (fixed, per_row) = Poly::elements(&[Dim::rows(1), Dim::rows(1)]).chord(8);
        assert_eq!((fixed, per_row), (0.0, 8.0));
    }
}
