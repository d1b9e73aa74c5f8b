//! What every kernel is run with: an instruction set and the threads to share the work.

use std::num::NonZeroUsize;

use crate::isa::Isa;
use crate::threads::Threads;

/// The means a kernel has: the instruction set it may use and the threads it may use.
///
/// The instruction set may change the bits of a result (each kernel says so), the number of threads never does.
#[derive(Debug)]
pub struct Compute {
    /// The instruction set; possession is proof that this CPU has it.
    pub isa: Isa,
    /// The threads, the calling one included.
    pub threads: Threads,
}

impl Compute {
    /// Kernels of `isa` on `num_threads` threads, of which the calling thread is one.
    pub fn new(isa: Isa, num_threads: NonZeroUsize) -> Compute {
        Compute { isa, threads: Threads::new(num_threads) }
    }
}
