//! The tables of a cluster file, as TOML has them.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;

pub(super) type Figure = Option<Spanned<f64>>;
pub(super) type Points = Option<Spanned<Vec<(f64, f64)>>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) device: BTreeMap<String, Spanned<DeviceTable>>,
    #[serde(default)]
    pub(super) node: Vec<Spanned<NodeTable>>,
    #[serde(default)]
    pub(super) level: Vec<Spanned<LevelTable>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeviceTable {
    pub(super) preset: Option<Spanned<String>>,
    pub(super) name: Option<String>,
    pub(super) host: Option<bool>,
    pub(super) tf32: Option<bool>,
    pub(super) memory_gib: Figure,
    pub(super) fp64_tflops: Figure,
    pub(super) fp32_tflops: Figure,
    pub(super) tf32_tflops: Figure,
    pub(super) half_tflops: Figure,
    pub(super) memory_gb_per_s: Figure,
    pub(super) launch_us: Figure,
    pub(super) action_us: Figure,
    pub(super) framework_gib: Figure,
    pub(super) host_gb_per_s: Figure,
    pub(super) collective_slowdown: Figure,
    pub(super) message_slowdown: Figure,
    #[serde(default)]
    pub(super) efficiency: EfficiencyTable,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProductsTable {
    pub(super) fp64: Points,
    pub(super) fp32: Points,
    pub(super) tf32: Points,
    pub(super) half: Points,
    pub(super) bytes: Points,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EfficiencyTable {
    #[serde(default)]
    pub(super) matrix: ProductsTable,
    #[serde(default)]
    pub(super) convolution: ProductsTable,
    #[serde(default)]
    pub(super) attention: ProductsTable,
    pub(super) normalisation: Points,
    pub(super) pointwise: Points,
    pub(super) embedding: Points,
    pub(super) optimizer: Points,
}

impl EfficiencyTable {
    /// In the order of `Efficiency::curves`.
    pub(super) fn points(self) -> impl Iterator<Item = Points> {
        let Self { matrix, convolution, attention, normalisation, pointwise, embedding, optimizer } = self;
        let products = [matrix, convolution, attention].into_iter();
        let products =
            products.flat_map(|ProductsTable { fp64, fp32, tf32, half, bytes }| [fp64, fp32, tf32, half, bytes]);
        products.chain([normalisation, pointwise, embedding, optimizer])
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeTable {
    pub(super) device: Spanned<String>,
    pub(super) devices: Spanned<u32>,
    pub(super) count: Option<Spanned<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LevelTable {
    pub(super) name: String,
    pub(super) nodes: Option<Spanned<u32>>,
    pub(super) latency_us: Spanned<f64>,
    pub(super) gb_per_s: Spanned<f64>,
    pub(super) collective_latency_us: Figure,
    pub(super) collective_gb_per_s: Figure,
}
