//! `entrokv bench --kernels`: every kernel beside what memory and the arithmetic units can do.

use std::io::{self, Write};

use entrokv_kernels::compute::Compute;
use entrokv_kernels::speed::{self, Machine};
use serde::Serialize;

use super::cpu_name;
use crate::failure::Failure;
use crate::model_args::RunArgs;
use crate::progress::Progress;

#[derive(Serialize)]
struct Report {
    cpu: String,
    isa: &'static str,
    threads: usize,
    machine: Limits,
    kernels: Vec<Row>,
}

/// What the machine can do with these threads.
#[derive(Serialize)]
struct Limits {
    read_gb_per_s: f64,
    f32_gop_per_s: f64,
    int8_gop_per_s: f64,
    bf16_gop_per_s: Option<f64>,
}

#[derive(Serialize)]
struct Row {
    kernel: String,
    shape: String,
    seconds: f64,
    gb_per_s: f64,
    gop_per_s: f64,
    bound: &'static str,
    share_of_bound: Option<f64>,
}

/// Measures and prints.
pub(super) fn run(run: &RunArgs, json: bool) -> Result<(), Failure> {
    let options = run.options();
    let compute = Compute::new(options.isa, options.threads);
    let machine = Machine::measure(&compute)?;
    let mut report = Report {
        cpu: cpu_name(),
        isa: options.isa.name(),
        threads: compute.threads.num_threads(),
        machine: Limits {
            read_gb_per_s: machine.read_gb_per_s,
            f32_gop_per_s: machine.f32_gop_per_s,
            int8_gop_per_s: machine.int8_gop_per_s,
            bf16_gop_per_s: machine.bf16_gop_per_s,
        },
        kernels: Vec::new(),
    };
    let cases = speed::cases();
    let bar = Progress::steps("measuring kernels", cases.len() as u64);
    for case in &cases {
        let speed = case(&compute);
        report.kernels.push(Row {
            seconds: speed.time.as_secs_f64(),
            gb_per_s: speed.gb_per_s(),
            gop_per_s: speed.gop_per_s(),
            bound: speed.bound.name(),
            share_of_bound: speed.share(&machine),
            kernel: speed.kernel,
            shape: speed.shape,
        });
        bar.set(report.kernels.len() as u64);
    }
    drop(bar);
    print(json, &report)
}

fn print(json: bool, report: &Report) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, report)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(out, "{} ({}, {} threads)", report.cpu, report.isa, report.threads)?;
    let Limits { read_gb_per_s, f32_gop_per_s, int8_gop_per_s, bf16_gop_per_s } = &report.machine;
    write!(out, "limits: read {read_gb_per_s:.1} GB/s, f32 {f32_gop_per_s:.0}, int8 {int8_gop_per_s:.0}")?;
    match bf16_gop_per_s {
        Some(bf16) => writeln!(out, ", bf16 {bf16:.0} Gop/s")?,
        None => writeln!(out, " Gop/s; no bf16 dot products")?,
    }
    writeln!(
        out,
        "{:<22} {:<32} {:>9} {:>8} {:>8}  {:<7} {:>6}",
        "kernel", "shape", "ms", "GB/s", "Gop/s", "bound", "share"
    )?;
    for row in &report.kernels {
        let share = row.share_of_bound.map_or("-".to_string(), |share| format!("{:.0} %", share * 100.0));
        let operations = if row.gop_per_s > 0.0 { format!("{:.1}", row.gop_per_s) } else { "-".to_string() };
        writeln!(
            out,
            "{:<22} {:<32} {:>9.3} {:>8.1} {operations:>8}  {:<7} {share:>6}",
            row.kernel,
            row.shape,
            row.seconds * 1e3,
            row.gb_per_s,
            row.bound
        )?;
    }
    Ok(())
}
