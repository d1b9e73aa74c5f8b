//! Carries a stream of bytes from a server into the growing file: stoppable, patient, and going on where it was cut.

use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _};

use super::error::{PullError, one_line};
use super::partial::Partial;
use super::progress::Stage;
use super::watch::{TICK, Watch};

/// Time without a connection, or without a byte, after which a server counts as gone.
const SILENCE: Duration = Duration::from_secs(60);

/// Attempts in a row that bring no byte before the transfer is given up.
pub(crate) const FRUITLESS_ATTEMPTS: u32 = 4;

/// First pause between attempts; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// The first bytes of every model file.
const MAGIC: &[u8] = b"GGUF";

/// Whether the proxies named by the environment are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proxies {
    /// As curl would.
    FromEnvironment,
    /// For servers on this very machine.
    #[cfg(test)]
    Never,
}

/// Why an attempt ended early.
#[derive(Debug)]
pub(crate) enum Cut {
    /// Worth another attempt; the error, should no attempt help.
    Broken(PullError),
    /// Not worth one.
    Fatal(PullError),
}

impl From<PullError> for Cut {
    fn from(error: PullError) -> Self {
        Self::Fatal(error)
    }
}

/// A client that gives up on silent servers but never on slow ones.
pub(crate) fn client(proxies: Proxies) -> Result<reqwest::Client, PullError> {
    let builder = reqwest::Client::builder()
        .user_agent(concat!("entrokv/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(SILENCE)
        .read_timeout(SILENCE);
    let builder = match proxies {
        Proxies::FromEnvironment => builder,
        #[cfg(test)]
        Proxies::Never => builder.no_proxy(),
    };
    builder.build().map_err(|error| PullError::NoNetwork { what: "any model".to_owned(), detail: cause(&error) })
}

/// Runs one future to its end on a runtime of its own, which is left at once when it ends.
pub(crate) fn run<T>(future: impl Future<Output = Result<T, PullError>>) -> Result<T, PullError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| PullError::Io { path: "network runtime".into(), source })?;
    let outcome = runtime.block_on(future);
    // A name lookup cannot be stopped: leave it behind rather than wait for it.
    runtime.shutdown_background();
    outcome
}

/// Waits for `future`, looking at the watch all the while.
pub(crate) async fn patiently<F: Future>(future: F, done: u64, watch: &mut Watch<'_>) -> Result<F::Output, PullError> {
    let mut future = pin!(future);
    loop {
        match tokio::time::timeout(TICK, future.as_mut()).await {
            Ok(output) => return Ok(output),
            Err(_elapsed) => watch.report(Stage::Downloading, done)?,
        }
    }
}

/// Makes attempts until one succeeds, as long as they bring something; records what they brought if none does.
///
/// # Errors
/// That of the last attempt, or of the first that was fatal.
pub(crate) fn persist(
    partial: &mut Partial,
    watch: &mut Watch<'_>,
    mut attempt: impl AsyncFnMut(&mut Partial, &mut Watch<'_>) -> Result<(), Cut>,
) -> Result<(), PullError> {
    let outcome = run(async {
        let mut fruitless = 0;
        loop {
            let before = partial.bytes();
            let error = match attempt(partial, watch).await {
                Ok(()) => return Ok(()),
                Err(Cut::Fatal(error)) => return Err(error),
                Err(Cut::Broken(error)) => error,
            };
            fruitless = if partial.bytes() > before { 1 } else { fruitless + 1 };
            if fruitless >= FRUITLESS_ATTEMPTS {
                return Err(error);
            }
            let pause = FIRST_PAUSE * 2_u32.saturating_pow(fruitless - 1);
            patiently(tokio::time::sleep(pause), partial.bytes(), watch).await?;
        }
    });
    if outcome.as_ref().is_err_and(PullError::keeps_partial) {
        partial.checkpoint(0)?;
    }
    outcome
}

/// Appends a whole stream to `partial`, of a file of `total` bytes where that is known.
///
/// # Errors
/// [`Cut::Broken`] where the stream breaks off; what arrived before is kept.
pub(crate) async fn drain<B: AsRef<[u8]>, E: std::error::Error>(
    mut stream: impl Stream<Item = Result<B, E>> + Unpin,
    partial: &mut Partial,
    total: Option<u64>,
    what: &str,
    watch: &mut Watch<'_>,
) -> Result<(), Cut> {
    let interrupted = |partial: &Partial, detail: String| {
        Cut::Broken(PullError::Interrupted { what: what.to_owned(), bytes: partial.bytes(), detail })
    };
    let mut reported = Instant::now();
    while let Some(chunk) = patiently(stream.next(), partial.bytes(), watch).await? {
        let chunk = chunk.map_err(|error| interrupted(partial, cause(&error)))?;
        let chunk = chunk.as_ref();
        if partial.bytes() == 0 {
            check_magic(chunk, what)?;
        }
        let end = partial.bytes() + chunk.len() as u64;
        if let Some(expected) = total.filter(|&total| total < end) {
            return Err(PullError::WrongSize { what: what.to_owned(), expected, got: end }.into());
        }
        partial.append_stream(chunk, total.unwrap_or(0))?;
        watch.check()?;
        if reported.elapsed() >= TICK {
            reported = Instant::now();
            watch.report(Stage::Downloading, partial.bytes())?;
        }
    }
    if total.is_some_and(|total| partial.bytes() < total) {
        return Err(interrupted(partial, "the server closed the connection".to_owned()));
    }
    if partial.bytes() < MAGIC.len() as u64 {
        return Err(PullError::NotGguf { what: what.to_owned(), head: String::new() }.into());
    }
    Ok(())
}

/// Refuses at its first bytes what is no model: a login page, an error message, another format.
fn check_magic(head: &[u8], what: &str) -> Result<(), PullError> {
    if head.iter().zip(MAGIC).all(|(got, expected)| got == expected) {
        return Ok(());
    }
    let head = String::from_utf8_lossy(&head[..head.len().min(24)]).into_owned();
    Err(PullError::NotGguf { what: what.to_owned(), head })
}

/// The innermost cause of an error: the outer ones only repeat that a request failed, and for which URL.
pub(crate) fn cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    one_line(&innermost.to_string())
}
