//! Ctrl-C as a flag: the engine stops between layers, the command ends in its own words.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// The flag Ctrl-C raises. The first call installs the handler; a second Ctrl-C before anybody looked ends the program.
pub(crate) fn flag() -> Arc<AtomicBool> {
    let flag = FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        let raised = Arc::clone(&flag);
        // Where no handler can be installed Ctrl-C keeps its usual meaning.
        let _ = ctrlc::set_handler(move || {
            if raised.swap(true, Ordering::SeqCst) {
                process::exit(130);
            }
        });
        flag
    });
    Arc::clone(flag)
}

/// Whether Ctrl-C was pressed.
pub(crate) fn is_raised() -> bool {
    flag().load(Ordering::SeqCst)
}

/// Forgets a Ctrl-C that has been answered.
pub(crate) fn clear() {
    flag().store(false, Ordering::SeqCst);
}
