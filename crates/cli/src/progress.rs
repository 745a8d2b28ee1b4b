//! Progress on stderr, if that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

const TICK: Duration = Duration::from_millis(100);

/// Something under way; its line vanishes when it is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Work of unknown length.
    pub(crate) fn spinner(message: &'static str) -> Self {
        let bar = ProgressBar::new_spinner().with_message(message);
        bar.set_style(style("{spinner} {msg} {elapsed}"));
        Self::begin(bar)
    }

    /// Work in so many parts.
    pub(crate) fn bar(message: &'static str, parts: usize) -> Self {
        let bar = ProgressBar::new(parts as u64).with_message(message);
        bar.set_style(style("{msg} {wide_bar} {pos}/{len}, {eta} left"));
        Self::begin(bar)
    }

    /// Shows the line at once, however short the work will be.
    fn begin(bar: ProgressBar) -> Self {
        bar.tick();
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    /// One more part is done.
    pub(crate) fn advance(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates are written here")
}
