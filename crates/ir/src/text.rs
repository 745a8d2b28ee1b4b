//! The text form: one line for each input, Param, Buffer, Constant and Op, ids as in messages.
//!
//! ```text
//! graph "Bert" schema 1 training rows 8
//! input v0:i64[b,128] "input_ids"
//! param p0 "embedding.weight" "decoder.weight" = v1:f32[30522,768] grad "p_embedding_weight"
//! buffer b0 "norm.running_mean" = v2:f32[768] "b_norm_running_mean" update v9
//! const c0 "lifted" = v3:u8[3] "c_lifted" data "AAEC"
//! op0 v4:f32[b,128,768] grad "embedding" = aten.embedding.default(v1, v0) @embedding "model.py":31
//! op1 v5:f32[b,128,768] grad alias v4 "dropout" = aten.dropout_.default(v4, 0.1, true) mutates v4 random
//! op2 v6:f32[b,768] "best", v7#2:i64[2b+1] "index" = leaf.Pair(v5, [1, <b-1>], how="max") no_grad opaque region 3
//! outputs v5, v0
//! ```
//!
//! After a Value: `grad` when it requires a gradient, `alias` and the Value whose storage it shares, its
//! name. `#2` is the place in the returned tuple where it differs from the place in the line. After the
//! arguments: what the Op changes in place, `no_grad`, `random`, `opaque`, `row_wise`, the region, the row group, `@` and
//! the module, file and line. An argument between `<` and `>` is computed from the batch size `b`.

use std::fmt::{self, Write};

use crate::graph::{Arg, Dim, Graph, Op, OpId, ValueDef, ValueId};

impl Graph {
    /// The text form. The graph must be a verified one.
    pub fn to_text(&self) -> String {
        Text { graph: self }.to_string()
    }

    /// The line of `op` in the text form.
    pub fn op_text(&self, op: OpId) -> String {
        OpLine { graph: self, id: op, op: &self.ops[op] }.to_string()
    }
}

struct Text<'g> {
    graph: &'g Graph,
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graph = self.graph;
        let mode = if graph.training { "training" } else { "evaluation" };
        writeln!(f, "graph {} schema {} {mode} rows {}", quoted(&graph.name), graph.schema, graph.sample_rows)?;
        for &input in &graph.inputs {
            writeln!(f, "input {}", Declared(graph, input, 0))?;
        }
        for (id, param) in graph.params.iter() {
            write!(f, "param {id} ")?;
            names(f, &param.name, &param.aliases)?;
            writeln!(f, "= {}", Declared(graph, param.value, 0))?;
        }
        for (id, buffer) in graph.buffers.iter() {
            write!(f, "buffer {id} ")?;
            names(f, &buffer.name, &buffer.aliases)?;
            write!(f, "= {}", Declared(graph, buffer.value, 0))?;
            match buffer.update {
                Some(update) => writeln!(f, " update {update}")?,
                None => writeln!(f)?,
            }
        }
        for (id, constant) in graph.constants.iter() {
            let value = Declared(graph, constant.value, 0);
            writeln!(f, "const {id} {} = {value} data {}", quoted(&constant.name), quoted(&constant.data))?;
        }
        for (id, op) in graph.ops.iter() {
            writeln!(f, "{}", OpLine { graph, id, op })?;
        }
        writeln!(f, "outputs{}", Listed(&graph.outputs))
    }
}

struct OpLine<'g> {
    graph: &'g Graph,
    id: OpId,
    op: &'g Op,
}

impl fmt::Display for OpLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = self.op;
        write!(f, "{}", self.id)?;
        for (place, &result) in (0..).zip(&op.results) {
            let separator = if place == 0 { " " } else { ", " };
            write!(f, "{separator}{}", Declared(self.graph, result, place))?;
        }
        write!(f, " = {}(", bare_or_quoted(&op.target))?;
        let mut separator = "";
        for arg in &op.args {
            write!(f, "{separator}{arg}")?;
            separator = ", ";
        }
        for (name, arg) in &op.kwargs {
            write!(f, "{separator}{}={arg}", bare_or_quoted(name))?;
            separator = ", ";
        }
        f.write_char(')')?;
        if !op.mutates.is_empty() {
            write!(f, " mutates{}", Listed(&op.mutates))?;
        }
        for (flag, word) in
            [(!op.grad_enabled, " no_grad"), (op.random, " random"), (op.opaque, " opaque"), (op.row_wise, " row_wise")]
        {
            f.write_str(if flag { word } else { "" })?;
        }
        if let Some(region) = op.region {
            write!(f, " region {region}")?;
        }
        if let Some(group) = op.row_group {
            write!(f, " row_group {group}")?;
        }
        if !op.module.is_empty() {
            write!(f, " @{}", bare_or_quoted(&op.module))?;
        }
        match &op.source {
            Some(source) => write!(f, " {}:{}", quoted(&source.file), source.line),
            None => Ok(()),
        }
    }
}

/// A Value where it is defined; the number is the place in the returned tuple that goes without saying.
struct Declared<'g>(&'g Graph, ValueId, u32);

impl fmt::Display for Declared<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(graph, id, usual_place) = *self;
        let value = &graph.values[id];
        write!(f, "{id}")?;
        match value.def {
            ValueDef::Op { result, .. } if result != usual_place => write!(f, "#{result}")?,
            _ => {}
        }
        write!(f, ":{}[", value.dtype)?;
        for (index, dim) in value.shape.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            write!(f, "{separator}{dim}")?;
        }
        f.write_char(']')?;
        if value.requires_grad {
            f.write_str(" grad")?;
        }
        if let Some(base) = value.alias_of {
            write!(f, " alias {base}")?;
        }
        write!(f, " {}", quoted(&value.name))
    }
}

struct Listed<'v>(&'v [ValueId]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, value) in self.0.iter().enumerate() {
            let separator = if index == 0 { " " } else { ", " };
            write!(f, "{separator}{value}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.per_row {
            0 => return write!(f, "{}", self.fixed),
            1 => f.write_char('b')?,
            -1 => f.write_str("-b")?,
            per_row => write!(f, "{per_row}b")?,
        }
        if self.fixed == 0 { Ok(()) } else { write!(f, "{:+}", self.fixed) }
    }
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Value(value) => write!(f, "{value}"),
            Self::Dim(dim) => write!(f, "<{dim}>"),
            Self::Bool(flag) => write!(f, "{flag}"),
            Self::Int(number) => write!(f, "{number}"),
            Self::Float(text) => f.write_str(text),
            Self::Str(text) => f.write_str(&quoted(text)),
            Self::Torch(text) if text.starts_with("torch.") && is_bare(text) => f.write_str(text),
            Self::Torch(text) => write!(f, "torch{}", quoted(text)),
            Self::List(items) => {
                f.write_char('[')?;
                for (index, item) in items.iter().enumerate() {
                    let separator = if index == 0 { "" } else { ", " };
                    write!(f, "{separator}{item}")?;
                }
                f.write_char(']')
            }
        }
    }
}

fn names(f: &mut fmt::Formatter<'_>, name: &str, aliases: &[String]) -> fmt::Result {
    write!(f, "{} ", quoted(name))?;
    aliases.iter().try_for_each(|alias| write!(f, "{} ", quoted(alias)))
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a string has a JSON form")
}

fn bare_or_quoted(text: &str) -> String {
    if is_bare(text) { text.to_owned() } else { quoted(text) }
}

fn is_bare(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_bare_char)
}

/// Characters of targets, module paths and argument names that need no quotes.
pub(crate) fn is_bare_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '.'
}
