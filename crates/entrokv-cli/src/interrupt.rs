//! Ctrl-C: it ends the program, with exit code 130, unless somebody listens who can end in better words.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// What an engine or a transfer looks at.
static RAISED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// How many listen at the moment.
static LISTENERS: AtomicUsize = AtomicUsize::new(0);

/// Exit code of a program that Ctrl-C ended.
pub(crate) const EXIT_CODE: u8 = 130;

/// Takes over Ctrl-C; called once, before anything else happens.
pub(crate) fn install() {
    // Where no handler can be installed Ctrl-C keeps its usual meaning.
    let _ = ctrlc::set_handler(|| {
        // A second Ctrl-C before anybody looked means it.
        if LISTENERS.load(Ordering::SeqCst) == 0 || RAISED.swap(true, Ordering::SeqCst) {
            process::exit(i32::from(EXIT_CODE));
        }
    });
}

/// The flag that Ctrl-C raises while somebody is [`Listening`].
pub(crate) fn flag() -> Arc<AtomicBool> {
    Arc::clone(&RAISED)
}

/// As long as this lives, Ctrl-C raises the flag and does no more.
pub(crate) struct Listening(());

impl Listening {
    /// Starts to listen.
    pub(crate) fn start() -> Self {
        LISTENERS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }

    /// Raises the flag as Ctrl-C does.
    pub(crate) fn raise(&self) {
        RAISED.store(true, Ordering::SeqCst);
    }
}

/// Whatever was heard has been answered then.
impl Drop for Listening {
    fn drop(&mut self) {
        LISTENERS.fetch_sub(1, Ordering::SeqCst);
        RAISED.store(false, Ordering::SeqCst);
    }
}
