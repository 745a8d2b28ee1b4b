//! Progress on stderr, if that is a terminal.

use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

const TICK: Duration = Duration::from_millis(100);

/// The lines of all that is under way.
#[derive(Clone, Default)]
pub(crate) struct ProgressLines(MultiProgress);

impl ProgressLines {
    /// Work of unknown length.
    pub(crate) fn spinner(&self, message: &'static str) -> Progress {
        let bar = ProgressBar::new_spinner().with_message(message);
        self.begin(bar, "{spinner} {msg} {elapsed}")
    }

    /// Work in so many parts.
    pub(crate) fn bar(&self, message: &'static str, parts: usize) -> Progress {
        let bar = ProgressBar::new(parts as u64).with_message(message);
        self.begin(bar, "{msg} {wide_bar} {pos}/{len}, {eta} left")
    }

    /// Shows the line at once, however short the work will be.
    fn begin(&self, bar: ProgressBar, template: &str) -> Progress {
        let bar = self.0.add(bar);
        bar.set_style(ProgressStyle::with_template(template).expect("the templates are written here"));
        bar.tick();
        bar.enable_steady_tick(TICK);
        Progress(bar)
    }

    /// Wipes all lines away for good, though their work may go on.
    pub(crate) fn end(&self) {
        // Nothing is left to be done when a line cannot be wiped away.
        let _ = self.0.clear();
        self.0.set_draw_target(ProgressDrawTarget::hidden());
    }
}

/// Something under way; its line vanishes when it is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
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
