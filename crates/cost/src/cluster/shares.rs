//! Shares of the peaks that ops reach on any device of a family, until they are measured on one.
//!
//! How much work a device needs to get up to speed grows with its peak. So these tables go by the time
//! in microseconds that the work would take at the peak. Those of accelerators were measured by
//! `python -m pyrannc calibrate` on an H200, over kernels of forward and backward.

use super::device::Device;
use super::efficiency::{Curve, Efficiency, Products};

type Table = &'static [(f64, f64)];

struct ProductTables {
    fp64: Table,
    fp32: Table,
    tf32: Table,
    half: Table,
    bytes: Table,
}

const MATRIX: ProductTables = ProductTables {
    fp64: &[(0.5, 0.12), (4.0, 0.42), (32.0, 0.74), (257.0, 0.87)],
    fp32: &[(0.5, 0.09), (4.0, 0.32), (32.0, 0.61), (257.0, 0.74), (2050.0, 0.76)],
    tf32: &[(0.07, 0.016), (0.54, 0.09), (4.3, 0.29), (35.0, 0.51), (277.0, 0.62)],
    half: &[(0.03, 0.013), (0.27, 0.073), (2.2, 0.3), (17.0, 0.67), (140.0, 0.79)],
    bytes: COPY,
};

const CONVOLUTION: ProductTables = ProductTables {
    fp64: &[(14.0, 0.05), (55.0, 0.1), (221.0, 0.12)],
    fp32: &[(14.0, 0.33), (55.0, 0.48), (221.0, 0.69)],
    tf32: &[(1.9, 0.08), (7.5, 0.2), (30.0, 0.33), (120.0, 0.42)],
    half: &[(0.9, 0.057), (3.7, 0.17), (15.0, 0.31), (60.0, 0.44)],
    bytes: COPY,
};

const ATTENTION: ProductTables = ProductTables {
    fp64: &[(28.0, 0.27), (450.0, 0.31)],
    fp32: &[(28.0, 0.29), (112.0, 0.46), (450.0, 0.49), (1800.0, 0.51)],
    tf32: &[(3.8, 0.04), (15.0, 0.061), (61.0, 0.066), (243.0, 0.069)],
    half: &[(1.9, 0.13), (7.6, 0.27), (30.0, 0.29), (121.0, 0.32)],
    bytes: COPY,
};

const COPY: Table = &[(0.14, 0.1), (1.1, 0.52), (8.7, 0.82), (70.0, 0.89), (560.0, 0.9)];
const NORMALISATION: Table = &[(0.19, 0.055), (1.5, 0.3), (12.0, 0.5), (98.0, 0.57), (780.0, 0.76)];
const EMBEDDING: Table = &[(0.2, 0.05), (2.0, 0.15), (42.0, 0.22), (237.0, 0.46)];
/// Steps that go through all tensors once for each of their operations, as torch's do.
const OPTIMIZER: Table = &[(6.1, 0.077), (98.0, 0.27)];

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
