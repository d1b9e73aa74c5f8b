//! What reading a prompt and generating a token cost, without the program around the engine:
//! `cargo run --release -p entrokv --example token_path -- MODEL.gguf PROMPT STEPS [THREADS]`
//!
//! Prints tokens a second of the prompt, and of the steps the shortest and the median. On a shared machine the shortest
//! says what the code costs, the median what else was running. `ENTROKV_ISA` picks the instruction set. With `tiny` for the
//! file, a seeded model built in memory is run: the same work on every machine, which `benches/decode_step.txt` counts.
#![allow(clippy::print_stdout, reason = "an example prints its figures")]

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{env, hint};

use entrokv::engine::StepOutput;
use entrokv::tiny::{TinyArchitecture, TinyModel};
use entrokv::{EndTokens, Engine, Gguf, Isa, Model, ModelOptions, Request};
use entrokv_kernels::weight_type::WeightType;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (model, prompt, steps, threads) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [model, prompt, steps] => (model, prompt, steps, "1"),
        [model, prompt, steps, threads] => (model, prompt, steps, threads),
        _ => return Err("usage: token_path MODEL.gguf|tiny PROMPT STEPS [THREADS]".into()),
    };
    let (prompt, steps): (usize, usize) = (prompt.parse()?, steps.parse()?);
    let isa = env::var("ENTROKV_ISA").map_or(Ok(Isa::detect()), |name| Isa::named(&name))?;
    let options = ModelOptions { threads: threads.parse::<NonZeroUsize>()?, isa, ..ModelOptions::default() };
    let mut model = if model == "tiny" {
        let tiny = TinyModel {
            context_length: 4096,
            num_layers: 4,
            num_heads: 6,
            num_kv_heads: 2,
            head_dim: 64,
            embedding_length: 384,
            feed_forward_length: 1024,
            weight_type: WeightType::Q4_1,
            ..TinyModel::new(TinyArchitecture::Llama)
        };
        Model::from_gguf(&Gguf::from_bytes(tiny.gguf()?)?, &options, &mut |_| ())?
    } else {
        Model::open(Path::new(model), &options, &mut |_| ())?
    };

    let vocab = model.tokenizer.vocab_size() as u32;
    let ids = (0u32..).map(|i| i.wrapping_mul(2_654_435_761) % vocab).take(prompt).collect();
    let request = Request { end_tokens: EndTokens::Ignore, ..Request::greedy(ids, steps + 1) };
    let id = model.engine.submit(request)?;
    let start = Instant::now();
    while step(&mut model.engine)?.token.is_none() {}
    let reading = start.elapsed();
    let mut times = Vec::with_capacity(steps);
    generate(&mut model.engine, steps, &mut times)?;
    model.engine.close(id);

    times.sort_unstable();
    let (shortest, median) = (times[0].as_secs_f64() * 1e6, times[steps / 2].as_secs_f64() * 1e6);
    println!("prompt: {:.1} tokens/s", prompt as f64 / reading.as_secs_f64());
    println!("steps:  {shortest:.1} us shortest, {median:.1} us median of {steps}");
    Ok(())
}

/// The steps measured: a function of its own, so that a tool can count what happens inside it and nothing else.
#[inline(never)]
fn generate(engine: &mut Engine, steps: usize, times: &mut Vec<Duration>) -> Result<(), Box<dyn Error>> {
    for _ in 0..steps {
        let start = Instant::now();
        hint::black_box(step(engine)?);
        times.push(start.elapsed());
    }
    Ok(())
}

/// One step of the only sequence.
fn step(engine: &mut Engine) -> Result<StepOutput, Box<dyn Error>> {
    engine.step()?.pop().ok_or_else(|| "the sequence has ended".into())
}
