//! Shares of the peaks that ops reach on any device of a family, until they are measured on one.
//!
//! How much work a device needs to get up to speed grows with its peak. So these tables go by the time
//! in microseconds that the work would take at the peak. Those of accelerators come from an H200.

use crate::device::Device;
use crate::efficiency::{Curve, Efficiency, Products};

type Table = &'static [(f64, f64)];

struct ProductTables {
    fp64: Table,
    fp32: Table,
    tf32: Table,
    half: Table,
    bytes: Table,
}

const MATRIX: ProductTables = ProductTables {
    fp64: &[(4.0, 0.2), (30.0, 0.5), (250.0, 0.7), (15_000.0, 0.8)],
    fp32: &[(4.0, 0.2), (30.0, 0.5), (250.0, 0.68), (15_000.0, 0.76)],
    tf32: &[(0.5, 0.08), (4.0, 0.25), (30.0, 0.5), (250.0, 0.65), (2000.0, 0.72)],
    half: &[(0.3, 0.06), (2.0, 0.25), (17.0, 0.55), (140.0, 0.7), (1100.0, 0.79)],
    bytes: COPY,
};

const CONVOLUTION: ProductTables = ProductTables {
    fp64: &[(30.0, 0.3), (250.0, 0.5)],
    fp32: &[(30.0, 0.4), (250.0, 0.6)],
    tf32: &[(2.0, 0.1), (20.0, 0.3), (200.0, 0.45)],
    half: &[(2.0, 0.1), (20.0, 0.3), (200.0, 0.45), (2000.0, 0.55)],
    bytes: &[(2.0, 0.3), (20.0, 0.55), (200.0, 0.65)],
};

const ATTENTION: ProductTables = ProductTables {
    fp64: &[(30.0, 0.2), (250.0, 0.3)],
    fp32: &[(30.0, 0.25), (250.0, 0.4)],
    tf32: &[(2.0, 0.04), (20.0, 0.1), (200.0, 0.14)],
    half: &[(2.0, 0.08), (20.0, 0.22), (200.0, 0.33), (2000.0, 0.38)],
    bytes: COPY,
};

const COPY: Table = &[(0.2, 0.08), (2.0, 0.4), (20.0, 0.75), (200.0, 0.86), (2000.0, 0.89)];
const NORMALISATION: Table = &[(0.2, 0.05), (2.0, 0.3), (20.0, 0.6), (200.0, 0.72)];
const EMBEDDING: Table = &[(0.2, 0.03), (2.0, 0.15), (20.0, 0.35), (200.0, 0.5)];
const OPTIMIZER: Table = &[(2.0, 0.3), (20.0, 0.65), (200.0, 0.8)];

/// On the host's processor caches serve what is small.
const HOST_PRODUCTS: ProductTables =
    ProductTables { fp64: HOST_FLOPS, fp32: HOST_FLOPS, tf32: HOST_FLOPS, half: HOST_FLOPS, bytes: HOST_BYTES };
const HOST_FLOPS: Table = &[(10.0, 0.5), (100.0, 0.7), (1000.0, 0.75)];
const HOST_BYTES: Table = &[(1.0, 1.0)];

impl Efficiency {
    /// The built-in shares of a device with these peaks.
    pub fn built_in(device: &Device) -> Self {
        let memory = |table: Table| curve(table, device.memory_bytes_per_s);
        let products = |tables: &ProductTables| Products {
            fp64: curve(tables.fp64, device.flops_per_s.fp64),
            fp32: curve(tables.fp32, device.flops_per_s.fp32),
            tf32: curve(tables.tf32, device.flops_per_s.tf32),
            half: curve(tables.half, device.flops_per_s.half),
            bytes: memory(tables.bytes),
        };
        if device.host {
            return Self {
                matrix: products(&HOST_PRODUCTS),
                convolution: products(&HOST_PRODUCTS),
                attention: products(&HOST_PRODUCTS),
                normalisation: memory(HOST_BYTES),
                pointwise: memory(HOST_BYTES),
                embedding: memory(HOST_BYTES),
                optimizer: memory(HOST_BYTES),
            };
        }
        Self {
            matrix: products(&MATRIX),
            convolution: products(&CONVOLUTION),
            attention: products(&ATTENTION),
            normalisation: memory(NORMALISATION),
            pointwise: memory(COPY),
            embedding: memory(EMBEDDING),
            optimizer: memory(OPTIMIZER),
        }
    }
}

/// By the work that a device with this peak does in a second.
fn curve(table: Table, peak_per_s: f64) -> Curve {
    let points: Vec<(f64, f64)> = table.iter().map(|&(us, share)| (round(us / 1e6 * peak_per_s), share)).collect();
    Curve::new(points)
}

/// To three digits, as the tables are no finer.
fn round(work: f64) -> f64 {
    format!("{work:.2e}").parse().unwrap_or(work)
}
