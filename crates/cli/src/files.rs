//! What commands read.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rannc_cost::{Cluster, Device, Preset, Profile, ProfileError};
use rannc_ir::Graph;
use rannc_plan::{Plan, PlanFileError};

use crate::cluster::cluster;
use crate::kinds::{Kind, unreadable};

/// What is planned, for which devices, and what was measured of it there.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) graph: Graph,
    pub(crate) cluster: Cluster,
    pub(crate) profiles: Vec<Profile>,
}

impl Model {
    pub(crate) fn read(graph: &Path, cluster: &str, profiles: &[PathBuf]) -> Result<Self> {
        let mut models = Self::read_several(graph, &[cluster.to_owned()], profiles)?;
        models.pop().context("one cluster gives one model")
    }

    /// The model on each of the clusters, with the profiles of its devices. Every profile is of some cluster's device.
    pub(crate) fn read_several(graph: &Path, clusters: &[String], profiles: &[PathBuf]) -> Result<Vec<Self>> {
        let graph = read_graph(graph)?;
        let hash = graph.hash();
        let clusters = clusters.iter().map(|text| cluster(text)).collect::<Result<Vec<_>>>()?;
        let new = |cluster| Self { graph: graph.clone(), cluster, profiles: Vec::new() };
        let mut models: Vec<Self> = clusters.into_iter().map(new).collect();
        for path in profiles {
            let profile = read_profile(path, &hash)?;
            let tried = models.iter_mut().map(|model| model.adopt(&profile)).collect::<Vec<_>>();
            let used = tried.iter().any(Result::is_ok);
            if let Some(Err(error)) = tried.into_iter().next().filter(|_| !used) {
                bail!("{}: {error}", path.display());
            }
        }
        Ok(models)
    }

    fn adopt(&mut self, profile: &Profile) -> Result<()> {
        adopt(&mut self.cluster, profile)?;
        self.profiles.push(profile.clone());
        Ok(())
    }

    /// What a plan may use of every device, before the margin.
    pub(crate) fn limit_bytes(&self, limit_bytes: Option<u64>) -> u64 {
        let least_bytes = self.cluster.kinds.iter().map(|device| device.memory_bytes).min().unwrap_or(0);
        limit_bytes.map_or(least_bytes, |limit| limit.min(least_bytes))
    }
}

pub(crate) fn read_graph(path: &Path) -> Result<Graph> {
    let text =
        fs::read_to_string(path).map_err(|error| anyhow!("cannot read the graph file {}: {error}", path.display()))?;
    Graph::from_json(&text).map_err(|error| unreadable(path, Kind::Graph, || anyhow!("{}: {error}", path.display())))
}

pub(crate) fn read_plan(path: &Path) -> Result<Plan> {
    Plan::read(path).map_err(|error| match error {
        PlanFileError::Read { .. } => anyhow!(error),
        error => unreadable(path, Kind::Plan, || anyhow!("{}: {error}", path.display())),
    })
}

fn read_profile(path: &Path, graph_hash: &str) -> Result<Profile> {
    let file = path.display();
    let profile = Profile::read(path).map_err(|error| match error {
        ProfileError::Read { .. } => anyhow!(error),
        error => unreadable(path, Kind::Profile, || anyhow!("{file}: {error}")),
    })?;
    ensure!(
        profile.graph_hash == graph_hash,
        "{file}: the profile was measured for graph {}, this graph is {graph_hash}; measure this one",
        profile.graph_hash
    );
    Ok(profile)
}

/// Gives the device that was measured, which may be known by a preset's name, the name in the profile, and
/// the levels of links their measured figures.
fn adopt(cluster: &mut Cluster, profile: &Profile) -> Result<()> {
    let preset = |name: &str| Preset::find(name).map(|preset| preset.name);
    let named = |device: &Device| device.name == profile.device;
    let like = |device: &Device| preset(&profile.device).is_some_and(|name| preset(&device.name) == Some(name));
    let kind = cluster.kinds.iter().position(named).or_else(|| cluster.kinds.iter().position(like));
    let Some(kind) = kind else {
        let names: Vec<&str> = cluster.kinds.iter().map(|device| device.name.as_str()).collect();
        bail!(
            "the profile was measured on {}, the cluster has {}; give its device this name to use the profile",
            profile.device,
            names.join(", ")
        );
    };
    cluster.kinds[kind].name.clone_from(&profile.device);
    for level in &mut cluster.levels {
        if let Some(measured) = profile.levels.iter().find(|measured| measured.name == level.name) {
            (level.send, level.collective) = (measured.send, measured.collective);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rannc_cost::{Link, MeasuredLevel};

    use super::*;

    #[test]
    fn what_was_measured_takes_the_place_of_the_preset() {
        let mut cluster = Cluster::preset("H200", 2, 8).expect("16 devices");
        let link = Link { latency_us: 3.0, bytes_per_s: 1e9 };
        let mut profile = Profile::new("hash", "NVIDIA H200", "float32");
        profile.levels.push(MeasuredLevel { name: "InfiniBand".to_owned(), send: link, collective: link });
        let before = cluster.levels.clone();
        adopt(&mut cluster, &profile).expect("the same device");
        assert_eq!(cluster.kinds[0].name, "NVIDIA H200");
        assert_eq!(cluster.levels[0], before[0]);
        assert_eq!((cluster.levels[1].send, cluster.levels[1].collective), (link, link));
        profile.device = "NVIDIA H100 80GB HBM3".to_owned();
        assert!(adopt(&mut cluster, &profile).is_err());
    }
}
