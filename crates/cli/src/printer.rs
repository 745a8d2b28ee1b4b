//! What a command prints.

use rannc_report::Report;

use crate::args::FormatArgs;
use crate::context::Context;

/// Collects what a command prints: results for stdout, notes for stderr.
#[derive(Debug)]
pub(crate) struct Printer {
    json: bool,
    width: usize,
    pub(crate) out: String,
    pub(crate) notes: String,
}

impl Printer {
    pub(crate) fn new(format: FormatArgs, context: &Context) -> Self {
        let FormatArgs { json } = format;
        Self { json, width: context.width, out: String::new(), notes: String::new() }
    }

    /// The result of the command.
    pub(crate) fn report(&mut self, report: &impl Report) {
        self.out += &if self.json { report.json() } else { report.text(self.width) };
    }

    /// The result of the command, whose text form is another one.
    pub(crate) fn report_or(&mut self, report: &impl Report, text: &str) {
        self.out += &if self.json { report.json() } else { text.to_owned() };
    }

    /// A result that has no JSON form.
    pub(crate) fn text(&mut self, text: &str) {
        self.out += text;
    }

    /// A remark that is no part of the result.
    pub(crate) fn note(&mut self, line: &str) {
        self.notes += line;
        self.notes.push('\n');
    }
}
