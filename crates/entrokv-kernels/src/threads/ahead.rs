//! Memory that will be read soon, for threads that have nothing else to do to ask for: while a decode step's small serial
//! parts run on one thread, the others would leave the memory idle.
//!
//! Only hints: what is asked for is never looked at, so that it does not matter when it is gone, or changed.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::matrix::CACHE_LINE;

/// Most parts that are waited for at a time.
const MAX_PARTS: usize = 4;

/// Bits of a number of lines: up to 256 MiB of a part are asked for.
const LEN_BITS: u32 = 22;

/// Lines asked for at a time: some tenths of a microsecond, for which work that has come waits.
const STEP_LINES: u64 = 8;

/// One thread's share of some parts of memory, what it has not asked for yet.
#[derive(Default)]
pub(super) struct Ahead([AtomicU64; MAX_PARTS]);

impl Ahead {
    /// Makes it share `thread` out of `num_threads` of each of `parts`, of which further ones are left out.
    pub(super) fn set(&self, parts: &[&[u8]], thread: usize, num_threads: usize) {
        self.set_lines(parts.iter().map(|part| {
            let (first, len) = (part.as_ptr().addr() / CACHE_LINE, part.len() / CACHE_LINE);
            let start = len * thread / num_threads;
            ((first + start) as u64, (len * (thread + 1) / num_threads - start) as u64)
        }));
    }

    /// Makes it these lines, each the first of some and their number.
    fn set_lines(&self, shares: impl Iterator<Item = (u64, u64)>) {
        for (lines, (first, len)) in self.0.iter().zip(shares.chain(std::iter::repeat((0, 0)))) {
            // Of more than the bits can say the first ones are asked for.
            lines.store(first << LEN_BITS | len.min((1 << LEN_BITS) - 1), Ordering::Relaxed);
        }
    }

    /// Asks for a few lines; whether there were any.
    pub(super) fn step(&self) -> bool {
        for lines in &self.0 {
            let now = lines.load(Ordering::Relaxed);
            let len = now & ((1 << LEN_BITS) - 1);
            if len == 0 {
                continue;
            }
            let (first, asked) = (now >> LEN_BITS, len.min(STEP_LINES));
            let rest = (first + asked) << LEN_BITS | (len - asked);
            // If somebody else has just changed it, what is left is none of ours.
            if lines.compare_exchange(now, rest, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                (first..first + asked).for_each(|line| ask(line as usize * CACHE_LINE));
            }
            return true;
        }
        false
    }
}

/// Asks for the line at an address, into the second-level cache.
#[inline(always)]
fn ask(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which never faults.
    unsafe {
        std::arch::asm!("prefetcht1 [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First line and number of lines of what is left of each part.
    fn left(ahead: &Ahead) -> Vec<(u64, u64)> {
        let split = |lines: u64| (lines >> LEN_BITS, lines & ((1 << LEN_BITS) - 1));
        ahead.0.iter().map(|lines| split(lines.load(Ordering::Relaxed))).collect()
    }

    #[test]
    fn shares_are_whole_and_asked_for_to_their_end() {
        let memory = vec![0; 103 * CACHE_LINE + 5];
        let parts = [&memory[..], &memory[..2 * CACHE_LINE]];
        let first = (memory.as_ptr().addr() / CACHE_LINE) as u64;
        let shares = [0, 1, 2].map(|thread| {
            let ahead = Ahead::default();
            ahead.set(&parts, thread, 3);
            ahead
        });
        assert_eq!(left(&shares[0])[..2], [(first, 34), (first, 0)]);
        assert_eq!(left(&shares[1])[..2], [(first + 34, 34), (first, 1)]);
        assert_eq!(left(&shares[2])[..2], [(first + 68, 35), (first + 1, 1)]);

        let mut steps = 0;
        while shares[2].step() {
            steps += 1;
        }
        assert_eq!(steps, 35u32.div_ceil(8) + 1);
        assert_eq!(left(&shares[2])[..2], [(first + 103, 0), (first + 2, 0)]);
        shares[0].set(&[], 0, 3);
        assert!(!shares[0].step(), "nothing is left of earlier parts");
    }

    #[test]
    fn of_a_part_too_long_to_say_a_beginning_is_asked_for() {
        let ahead = Ahead::default();
        let first = 1u64 << 40;
        ahead.set_lines([(first, 1 << 30)].into_iter());
        assert_eq!(left(&ahead)[0], (first, (1 << LEN_BITS) - 1));
    }
}
