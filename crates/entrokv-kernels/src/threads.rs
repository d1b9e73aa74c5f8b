//! A fork-join pool that forks and joins in about a microsecond.
//!
//! Decoding one token runs some hundreds of kernels of 10 to 100 microseconds each, so handing work over must cost
//! about a microsecond: idle workers spin for [`SPIN`] before they sleep, and between two kernels of one token they
//! are always found spinning. An engine that has nothing to do costs no CPU: after [`SPIN`] everybody sleeps.
//!
//! A thread runs neighbouring tasks one after the other, because what these read mostly lies side by side: what a task asks
//! memory for ahead of itself is then found by the next. Who is done with its own share takes tasks from the ends of others.
//!
//! Invariants, each with a test:
//! 1. Every task of a call runs exactly once, and all have returned when the call returns.
//! 2. A worker that sleeps, or that the OS does not schedule, never delays a call: the caller waits only for the
//!    workers that have *entered* its call, and closes the door once no task is left to claim.
//! 3. A panic in a task reaches the caller after every entered worker has left; tasks not yet begun are dropped.
//! 4. A call made while another one is running (from a second thread, or from inside a task) runs its tasks on the
//!    calling thread: slower, never wrong, no deadlock.

mod ahead;

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ahead::Ahead;

/// How long an idle worker spins before it sleeps: longer than the serial gaps between the kernels of one token,
/// shorter than anything a user would see as a busy CPU.
pub const SPIN: Duration = Duration::from_micros(100);

/// How many times the caller looks for the last worker to leave before it sleeps too.
const JOIN_SPINS: u32 = 20_000;

/// A pool of `num_threads - 1` workers; the calling thread is always the remaining one.
///
/// With one thread there is no worker, no atomic and no lock: a call is a plain loop.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts a pool of `num_threads` threads, the calling one included.
    ///
    /// When the OS refuses to start a thread the pool goes on with those it has: [`Threads::num_threads`] tells.
    pub fn new(num_threads: NonZeroUsize) -> Threads {
        let num_cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        // With more threads than cores, a spinning worker steals the core of one that has work.
        let spin = if num_threads.get() <= num_cores { SPIN } else { Duration::ZERO };
        let shares = (0..num_threads.get()).map(|_| Apart::default()).collect();
        let ahead = (0..num_threads.get()).map(|_| Apart::default()).collect();
        let shared = Arc::new(Shared { shares, ahead, ..Shared::default() });
        let mut workers = Vec::with_capacity(num_threads.get() - 1);
        for index in 1..num_threads.get() {
            let shared = Arc::clone(&shared);
            match thread::Builder::new().name(format!("entrokv-{index}")).spawn(move || shared.work(index, spin)) {
                Ok(worker) => workers.push(worker),
                Err(_) => break,
            }
        }
        Threads { shared, workers }
    }

    /// Number of threads that share the work, the caller included.
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)`, `task(1)`, .. `task(num_tasks - 1)`, each once, on any thread and in any order of time; returns
    /// when all have returned. Tasks are claimed one by one, so uneven ones balance: each thread has a share of consecutive ones,
    /// which it runs in ascending order, then helps others from the end of theirs.
    ///
    /// # Panics
    /// With the payload of a task that panicked; further tasks may then not have been run. With 2^32 tasks or more.
    pub fn for_each(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        self.run(num_tasks, &|_, index| task(index));
    }

    /// [`Threads::for_each`] with something of its own for every thread, e.g. its scratch memory: `task(scratch, index)` is never
    /// run twice at a time with one `scratch`.
    ///
    /// # Panics
    /// If `scratch` is shorter than [`Threads::num_threads`], and as [`Threads::for_each`].
    pub fn for_each_with<S: Send>(&self, scratch: &mut [S], num_tasks: usize, task: impl Fn(&mut S, usize) + Sync) {
        assert!(scratch.len() >= self.num_threads(), "for_each_with needs scratch for every thread");
        let start = SendPtr(scratch.as_mut_ptr());
        self.run(num_tasks, &|thread, index| {
            // SAFETY: `thread` is one of the call's threads, of which there are no more than `scratch` has elements; each runs
            // one task at a time, and the call borrows `scratch`. `S: Send` allows the other thread.
            let scratch = unsafe { &mut *start.get().add(thread) };
            task(scratch, index);
        });
    }

    /// Cuts `data` into chunks of `chunk_len` (the last may be shorter) and runs `task(index, chunk)` for each.
    ///
    /// # Panics
    /// If `chunk_len` is 0, as `slice::chunks_mut` does, and as [`Threads::for_each`].
    pub fn for_each_chunk<T: Send>(&self, data: &mut [T], chunk_len: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        assert!(chunk_len > 0, "chunk_len must not be 0");
        let len = data.len();
        let start = SendPtr(data.as_mut_ptr());
        self.for_each(len.div_ceil(chunk_len), |index| {
            let from = index * chunk_len;
            let chunk_len = chunk_len.min(len - from);
            // SAFETY: `from + chunk_len <= len`, so the range lies inside `data`, which is borrowed for the whole call;
            // every index is run once (invariant 1), so no two live chunks overlap. `T: Send` allows the other thread.
            let chunk = unsafe { std::slice::from_raw_parts_mut(start.get().add(from), chunk_len) };
            task(index, chunk);
        });
    }

    /// Lets threads ask memory for `parts` (up to four) whenever they have nothing to do: what the caller's next calls
    /// will read, each thread its share of every part as [`Threads::for_each`] would share it out. A hint, in place of an
    /// earlier one.
    pub fn read_ahead(&self, parts: &[&[u8]]) {
        if self.workers.is_empty() {
            return;
        }
        for (thread, ahead) in self.shared.ahead.iter().enumerate() {
            ahead.0.set(parts, thread, self.shared.ahead.len());
        }
    }

    /// Runs `task(thread, index)` for every index, `thread` being different for those that run at a time.
    fn run(&self, num_tasks: usize, task: &Task<'_>) {
        let alone = || (0..num_tasks).for_each(|index| task(0, index));
        if self.workers.is_empty() || num_tasks <= 1 {
            return alone();
        }
        match self.shared.caller.try_lock() {
            Ok(turn) => self.shared.fork_join(turn, num_tasks, task),
            Err(std::sync::TryLockError::Poisoned(turn)) => {
                self.shared.fork_join(turn.into_inner(), num_tasks, task);
            }
            // Invariant 4: somebody's call is running.
            Err(std::sync::TryLockError::WouldBlock) => alone(),
        }
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("num_threads", &self.num_threads()).finish()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_sleepers();
        for worker in self.workers.drain(..) {
            // A worker catches every task's panic, so it cannot have died of one.
            let _ = worker.join();
        }
    }
}

/// A pointer that may be handed to another thread; who dereferences it argues why that is sound.
struct SendPtr<T>(*mut T);

impl<T> SendPtr<T> {
    /// The pointer. A method, so that closures capture the whole wrapper.
    fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: only the pointer is shared, and its users give each thread a disjoint range of `T: Send` (see `for_each_chunk`).
unsafe impl<T: Send> Sync for SendPtr<T> {}

/// What a call runs for each of its threads and tasks.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A call's task with its lifetime erased.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
}

/// On a cache line pair of its own, so that claiming tasks does not disturb who waits for the door.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// The tasks of one thread that nobody has claimed: `end << 32 | start`.
#[derive(Default)]
struct Share(AtomicU64);

impl Share {
    /// Makes these its tasks.
    fn set(&self, tasks: Range<u32>) {
        self.0.store(u64::from(tasks.end) << 32 | u64::from(tasks.start), Ordering::Relaxed);
    }

    /// Claims a task, the one that `take` leaves the rest of.
    fn claim(&self, take: impl Fn(&mut Range<u32>) -> Option<u32>) -> Option<usize> {
        // Relaxed: only the numbers matter here; the door publishes what they stand for.
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let mut tasks = now as u32..(now >> 32) as u32;
            let task = take(&mut tasks)?;
            let rest = u64::from(tasks.end) << 32 | u64::from(tasks.start);
            match self.0.compare_exchange_weak(now, rest, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(task as usize),
                Err(changed) => now = changed,
            }
        }
    }
}

/// What the caller and the workers share.
#[derive(Default)]
struct Shared {
    /// The door: `epoch << 32 | open << 31 | number of workers inside`.
    door: Apart<AtomicU64>,
    /// The tasks to claim, a share for the caller and each worker.
    shares: Box<[Apart<Share>]>,
    /// What each thread may ask memory for while it waits.
    ahead: Box<[Apart<Ahead>]>,
    /// Written only by the caller that holds `caller`, while the door is closed and nobody is inside; read only by
    /// workers that are inside.
    job: Apart<UnsafeCell<Option<Job>>>,
    /// Held for the length of a call.
    caller: Mutex<()>,
    /// The first panic of the running call.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Number of workers asleep, or about to be.
    sleepers: AtomicU32,
    sleep: Mutex<()>,
    wake: Condvar,
    /// Whether the caller sleeps until the last worker leaves.
    caller_sleeps: AtomicBool,
    leave: Mutex<()>,
    left: Condvar,
    stop: AtomicBool,
}

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

// SAFETY: `job` is the only field that is not `Sync` by itself. It is written with the door closed and nobody inside,
// and read by threads inside only; entering (compare-exchange, Acquire) happens after the door was opened (Release),
// and the caller's next write happens after it has seen the last one leave (Release, then Acquire). The task behind the
// pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it belongs to one thread.
unsafe impl Send for Shared {}

impl Shared {
    /// Runs the tasks on the calling thread and on every worker that comes.
    fn fork_join(&self, turn: MutexGuard<'_, ()>, num_tasks: usize, task: &Task<'_>) {
        // SAFETY: only the lifetime is erased. Nobody uses the pointer after this function: it closes the door and waits
        // for everyone inside, and nothing before that unwinds.
        let task = unsafe { std::mem::transmute::<&Task<'_>, *const Task<'static>>(task) };
        let job = Job { task };
        // SAFETY: we hold `caller`, the door is closed and nobody is inside (the previous call saw to that).
        unsafe { *self.job.0.get() = Some(job) };
        let num_shares = self.shares.len() as u64;
        let num_tasks = u32::try_from(num_tasks).expect("less than 2^32 tasks");
        let start = |share: u64| (u64::from(num_tasks) * share / num_shares) as u32;
        for (index, share) in (0..).zip(&self.shares) {
            share.0.set(start(index)..start(index + 1));
        }
        let epoch = (self.door.0.load(Ordering::Relaxed) >> 32) as u32;
        // SeqCst, as the load in `wake_sleepers`: either we see a worker that goes to sleep, or it sees the open door.
        self.door.0.store(u64::from(epoch.wrapping_add(1)) << 32 | OPEN, Ordering::SeqCst);
        self.wake_sleepers();

        self.run(job, 0);

        self.door.0.fetch_and(!OPEN, Ordering::AcqRel);
        self.wait_for_last();
        // The lock goes before a panic resumes, else it would be poisoned for no reason.
        let panic = lock(&self.panic).take();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Claims and runs tasks as thread `own` until none is left, those of its share first. Never unwinds: a panic is kept for the caller.
    fn run(&self, job: Job, own: usize) {
        // SAFETY: we are the caller or a worker inside, so the call that owns the task has not returned.
        let task = unsafe { &*job.task };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            while let Some(index) = self.shares[own].0.claim(Range::next) {
                task(own, index);
            }
            let (before, after) = self.shares.split_at(own);
            for share in after.iter().chain(before) {
                while let Some(index) = share.0.claim(Range::next_back) {
                    task(own, index);
                }
            }
        }));
        if let Err(payload) = outcome {
            self.shares.iter().for_each(|share| share.0.set(0..0));
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// The caller's wait until nobody is inside.
    fn wait_for_last(&self) {
        for _ in 0..JOIN_SPINS {
            if self.door.0.load(Ordering::Acquire) & INSIDE == 0 {
                return;
            }
            self.pause(0);
        }
        // A worker runs a long task, or the OS has taken its core: give ours away meanwhile.
        let mut guard = lock(&self.leave);
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while self.door.0.load(Ordering::SeqCst) & INSIDE != 0 {
            guard = self.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, Ordering::Relaxed);
    }

    /// What thread `own` does between two looks at the door.
    fn pause(&self, own: usize) {
        if !self.ahead[own].0.step() {
            std::hint::spin_loop();
        }
    }

    /// Wakes the workers that sleep.
    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            // With the lock taken, a worker has either not yet looked at the door or already waits.
            drop(lock(&self.sleep));
            self.wake.notify_all();
        }
    }

    /// The life of worker `index`.
    fn work(&self, index: usize, spin: Duration) {
        let mut seen_epoch = 0;
        while let Some(epoch) = self.wait_for_work(index, seen_epoch, spin) {
            seen_epoch = epoch;
            // SAFETY: we are inside, see `impl Sync`.
            if let Some(job) = unsafe { *self.job.0.get() } {
                self.run(job, index);
            }
            // SeqCst, as the load after it: either we see the caller go to sleep, or it sees us leave.
            if self.door.0.fetch_sub(1, Ordering::SeqCst) & INSIDE == 1 && self.caller_sleeps.load(Ordering::SeqCst) {
                drop(lock(&self.leave));
                self.left.notify_all();
            }
        }
    }

    /// Waits for the door of a call other than `seen_epoch` and enters; `None` when the pool is dropped.
    fn wait_for_work(&self, own: usize, seen_epoch: u32, spin: Duration) -> Option<u32> {
        let mut idle_since: Option<Instant> = None;
        loop {
            for _ in 0..32 {
                if let Some(epoch) = self.try_enter(seen_epoch) {
                    return Some(epoch);
                }
                self.pause(own);
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            let idle_since = *idle_since.get_or_insert_with(Instant::now);
            if idle_since.elapsed() >= spin {
                let mut guard = lock(&self.sleep);
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                while !self.has_work(seen_epoch) && !self.stop.load(Ordering::SeqCst) {
                    guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Whether a call other than `seen_epoch` is open.
    fn has_work(&self, seen_epoch: u32) -> bool {
        let door = self.door.0.load(Ordering::SeqCst);
        door & OPEN != 0 && (door >> 32) as u32 != seen_epoch
    }

    /// Steps inside, if a call other than `seen_epoch` is open; returns its epoch.
    fn try_enter(&self, seen_epoch: u32) -> Option<u32> {
        let mut door = self.door.0.load(Ordering::Relaxed);
        loop {
            let epoch = (door >> 32) as u32;
            if door & OPEN == 0 || epoch == seen_epoch {
                return None;
            }
            match self.door.0.compare_exchange_weak(door, door + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(epoch),
                Err(now) => door = now,
            }
        }
    }
}

/// Locks; the data behind these locks is valid at any time, so poison says nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn pool(num_threads: usize) -> Threads {
        Threads::new(NonZeroUsize::new(num_threads).unwrap())
    }

    #[test]
    fn every_task_runs_exactly_once() {
        for num_threads in [1, 2, 3, 8] {
            let threads = pool(num_threads);
            assert_eq!(threads.num_threads(), num_threads);
            for num_tasks in [0, 1, 2, 3, 7, 64, 1000] {
                let counts: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
                threads.for_each(num_tasks, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{num_threads} threads");
            }
        }
    }

    #[test]
    fn stress_of_many_short_calls_with_pauses() {
        for num_threads in [2, 3, 5] {
            let threads = pool(num_threads);
            let mut data = vec![0u64; 97];
            for round in 0..20_000u64 {
                threads.for_each_chunk(&mut data, 1 + (round % 13) as usize, |_, chunk| {
                    chunk.iter_mut().for_each(|x| *x += 1);
                });
                if round % 2_000 == 0 {
                    // Long enough that every worker is asleep when the next call comes.
                    thread::sleep(SPIN * 5);
                }
            }
            assert!(data.iter().all(|&x| x == 20_000));
        }
    }

    #[test]
    fn chunks_cover_the_data_in_order() {
        let threads = pool(3);
        for (len, chunk_len) in [(0, 4), (1, 4), (8, 4), (10, 4), (10, 100)] {
            let mut data = vec![usize::MAX; len];
            threads.for_each_chunk(&mut data, chunk_len, |index, chunk| {
                for (i, x) in chunk.iter_mut().enumerate() {
                    *x = index * chunk_len + i;
                }
            });
            assert_eq!(data, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn scratch_is_never_shared_at_a_time() {
        let threads = pool(4);
        let mut scratch: Vec<_> = (0..4).map(|_| (AtomicBool::new(false), 0usize)).collect();
        threads.for_each_with(&mut scratch, 1000, |(busy, count), _| {
            assert!(!busy.swap(true, Ordering::SeqCst));
            *count += 1;
            busy.store(false, Ordering::SeqCst);
        });
        assert_eq!(scratch.iter().map(|(_, count)| count).sum::<usize>(), 1000);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for num_threads in [1, 2, 4] {
            let threads = pool(num_threads);
            for _ in 0..50 {
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    threads.for_each(100, |i| assert_ne!(i, 37, "task 37"));
                }));
                let payload = outcome.unwrap_err();
                assert!(payload.downcast_ref::<String>().unwrap().contains("task 37"));
                let sum = AtomicUsize::new(0);
                threads.for_each(100, |i| {
                    sum.fetch_add(i, Ordering::Relaxed);
                });
                assert_eq!(sum.into_inner(), 4950);
            }
        }
    }

    #[test]
    fn a_call_inside_a_call_or_beside_it_does_not_deadlock() {
        let threads = pool(3);
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        threads.for_each(5, |_| {
                            threads.for_each(5, |i| {
                                sum.fetch_add(i, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 200 * 5 * 10);
    }

    #[test]
    fn idle_workers_sleep() {
        let threads = pool(2);
        threads.for_each(2, |_| ());
        // Soon, on a machine whose cores are not all busy with something else.
        let start = Instant::now();
        while threads.shared.sleepers.load(Ordering::SeqCst) != 1 {
            assert!(start.elapsed() < Duration::from_secs(20), "the worker does not sleep");
            thread::sleep(SPIN);
        }
    }

    #[test]
    fn long_tasks_let_the_caller_sleep_and_wake_it() {
        let threads = pool(2);
        for _ in 0..20 {
            let slow = AtomicUsize::new(0);
            let caller = thread::current().id();
            threads.for_each(2, |_| {
                if thread::current().id() != caller {
                    thread::sleep(Duration::from_millis(5));
                }
                slow.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(slow.into_inner(), 2);
        }
    }
}
