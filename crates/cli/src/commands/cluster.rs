//! `rannc cluster`.

use anyhow::Result;
use rannc_cost::{Cluster, presets};
use rannc_report::{ClusterTables, PresetList};

use crate::args::ClusterArgs;
use crate::cluster::{cluster, known};
use crate::context::Context;
use crate::printer::Printer;

pub(crate) fn run(args: ClusterArgs, context: &Context) -> Result<Printer> {
    let ClusterArgs { cluster: text, preset, nodes, devices, format } = args;
    let mut printer = Printer::new(format, context);
    if let Some(name) = preset {
        known(&name)?;
        let cluster = Cluster::preset(&name, nodes, devices)?;
        printer.report_or(&ClusterTables { cluster: &cluster }, &cluster.to_toml());
    } else if let Some(text) = text {
        printer.report(&ClusterTables { cluster: &cluster(&text)? });
    } else {
        printer.report(&PresetList::new(presets()));
    }
    Ok(printer)
}
